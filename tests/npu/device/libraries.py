"""CANN's libraries for the stand-in device: libraries that torch_npu links or opens.

``python -m tests.npu.device.libraries`` builds them for the torch_npu of the running interpreter, once, under
its virtual environment, and prints the folder for ``LD_LIBRARY_PATH``. ``runtime.c``, ``hccl.c`` and
``operators.c`` have the functions with an effect; every other function returns 0. Needs ``nm``, ``strings``
and ``gcc``.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

_HERE = Path(__file__).parent
_SOURCES = ("runtime.c", "hccl.c", "operators.c")
# torch_npu links these, in addition to the runtime's own libascendcl.so and libhccl.so.
_EMPTY = ("libacl_op_compiler.so", "libacl_tdt_channel.so", "libge_runner.so", "libgraph.so")
# Parts of torch_npu that are loaded on import.
_PARTS = ("_C*.so", "lib/libtorch_npu.so", "lib/libnpu_profiler.so", "lib/libtensorpipe.so")
_OPERATOR = re.compile(r"aclnn[A-Za-z0-9_]+")
_SIZE = "GetWorkspaceSize"
# Kinds of arguments that torch_npu creates by name; operators.c has tensors, scalars and integers.
_MADE = ("FloatArray", "BoolArray", "TensorList", "ScalarList")


def build() -> Path:
    """Build the libraries unless they exist; return their folder.

    Raises:
        SystemExit: torch or torch_npu is not installed in this environment, or a tool is missing.
    """
    torch, torch_npu = _package("torch"), _package("torch_npu")
    sources = b"".join((_HERE / name).read_bytes() for name in (*_SOURCES, "device.h", Path(__file__).name))
    digest = hashlib.sha256(sources).hexdigest()[:12]
    folder = Path(sys.prefix) / f"stand-in-{version('torch_npu')}-torch-{version('torch')}-{digest}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=sys.prefix) as temporary:
        made = Path(temporary) / folder.name
        made.mkdir()
        _build(made, torch, torch_npu)
        # All or nothing: another process may build the same libraries now.
        with contextlib.suppress(OSError):
            made.rename(folder)
    return folder


def _build(folder: Path, torch: Path, torch_npu: Path) -> None:
    parts = [path for pattern in _PARTS for path in sorted(torch_npu.glob(pattern))]
    provided = [*parts, *sorted((torch / "lib").glob("*.so*")), *_interpreter()]
    missing = _symbols(parts, "--undefined-only") - _symbols(provided, "--defined-only")
    compiled = {name: folder / f"{name}.o" for name in _SOURCES}
    for name, path in compiled.items():
        _run(["gcc", "-O1", "-fPIC", "-w", "-c", _HERE / name, "-o", path])
    here = {name for path in compiled.values() for name in _defined(path)}
    # The names are C++'s; an assembly label gives them to C functions.
    rest = "".join(
        f'long stub_{number}(void) __asm__("{name}");\nlong stub_{number}(void) {{ return 0; }}\n'
        for number, name in enumerate(sorted(missing - here))
    )
    # One library holds everything except the operators, which torch_npu looks up only in libopapi.so.
    runtime = "libascendcl.so"
    _link(folder, runtime, rest, compiled["runtime.c"], compiled["hccl.c"], "-lpthread")
    for name in (*_EMPTY, "libhccl.so"):
        _link(folder, name, "", "-Wl,--no-as-needed", f"-L{folder}", "-lascendcl")
    operators = _operators(torch_npu / "lib/libtorch_npu.so", _defined(compiled["operators.c"]))
    _link(folder, "libopapi.so", operators, compiled["operators.c"], f"-L{folder}", "-lascendcl")


def _operators(library: Path, written: set[str]) -> str:
    """Return C code of counting operators, for all names in the library without a written operator."""
    words = set(_run(["strings", "-n", "4", library]).splitlines())
    names = sorted({word.removesuffix(_SIZE) for word in words if _OPERATOR.fullmatch(word)})
    rows = "".join(f'{{"{name}", 0}}, ' for name in names)
    lines = [
        '#include "device.h"',
        f"struct counter stand_in_operators[] = {{{rows}{{0, 0}}}};",
        "void stand_in_count(int which);",
        "static long made[8];",
        *(f"void *aclCreate{name}(void) {{ return made; }}" for name in _MADE),
        *(f"int aclDestroy{name}(void) {{ return 0; }}" for name in (*_MADE, "AclOpExecutor")),
    ]
    for number, name in enumerate(names):
        if name not in written:
            lines.append(f"int {name}{_SIZE}(void) {{ return 0; }}")
            lines.append(f"int {name}(void) {{ stand_in_count({number}); return 0; }}")
    return "\n".join(lines) + "\n"


def _link(folder: Path, name: str, source: str, *rest: object) -> None:
    command = ["gcc", "-shared", "-fPIC", "-w", f"-I{_HERE}", "-x", "c", "-", "-x", "none"]
    _run([*command, *rest, f"-Wl,-soname,{name}", "-o", folder / name], source)


def _defined(path: Path) -> set[str]:
    return {line.split()[-1] for line in _run(["nm", "--defined-only", path]).splitlines()}


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"stand-in device: {name} is not installed for {sys.executable}; run make test-npu")
    return Path(spec.origin).parent


def _interpreter() -> list[Path]:
    """Return the files with Python's own functions: the executable or its shared library."""
    library = Path(sysconfig.get_config_var("LIBDIR") or ".") / (sysconfig.get_config_var("LDLIBRARY") or ".")
    return [
        path for path in (Path(sys.executable).resolve(), library) if path.is_file() and path.suffix != ".a"
    ]


def _symbols(libraries: list[Path], which: str) -> set[str]:
    """Return dynamic symbols that are not weak; symbols with a version belong to the system's libraries."""
    names = set()
    for library in libraries:
        for line in _run(["nm", "-D", which, "--no-demangle", library]).splitlines():
            *_, kind, name = line.split()
            plain, _, symbol_version = name.partition("@")
            if kind not in "wv" and not (which == "--undefined-only" and symbol_version):
                names.add(plain)
    return names


def _run(command: list[object], text: str | None = None) -> str:
    words = [str(word) for word in command]
    try:
        return subprocess.run(words, input=text, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError as error:
        raise SystemExit(
            f"stand-in device: {words[0]} is not installed; it comes with binutils or gcc"
        ) from error
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"stand-in device: {' '.join(words)} failed: {error.stderr.strip()}") from error


if __name__ == "__main__":
    print(build())
