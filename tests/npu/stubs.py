"""Empty stand-ins for the CANN libraries that torch_npu links, so that it loads on a machine without them.

``python tests/npu/stubs.py`` builds them for the torch_npu of the running interpreter, once, under its
virtual environment, and prints the folder for ``LD_LIBRARY_PATH``. Every function returns 0 and does nothing:
schemas, meta kernels and Python code of torch_npu work, its operators on NPU tensors do not. Needs ``nm`` and
``gcc``.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

# Libraries of CANN that torch_npu is linked with. All functions go to the first; the others only have to be.
LIBRARIES = (
    "libascendcl.so",
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
    "libge_runner.so",
    "libgraph.so",
    "libhccl.so",
)
# Its parts that are loaded on import.
_PARTS = ("_C*.so", "lib/libtorch_npu.so", "lib/libnpu_profiler.so", "lib/libtensorpipe.so")


def build() -> Path:
    """Build the libraries unless they are there; returns their folder.

    Raises:
        SystemExit: torch or torch_npu is not installed in this environment, or a tool is missing.
    """
    torch, torch_npu = _package("torch"), _package("torch_npu")
    folder = Path(sys.prefix) / f"cann-stubs-{version('torch_npu')}-torch-{version('torch')}"
    if all((folder / name).is_file() for name in LIBRARIES):
        return folder
    folder.mkdir(exist_ok=True)
    parts = [path for pattern in _PARTS for path in sorted(torch_npu.glob(pattern))]
    provided = [*parts, *sorted((torch / "lib").glob("*.so*")), *_interpreter()]
    missing = _symbols(parts, "--undefined-only") - _symbols(provided, "--defined-only")
    # The names are C++'s; a label in assembly gives them to functions of C.
    source = "".join(
        f'long stub_{number}(void) __asm__("{name}");\nlong stub_{number}(void) {{ return 0; }}\n'
        for number, name in enumerate(sorted(missing))
    )
    # The last one in this order is the first in LIBRARIES: a build that is cut short is not taken for whole.
    for name in reversed(LIBRARIES):
        text = source if name == LIBRARIES[0] else ""
        _run(
            [
                "gcc",
                "-shared",
                "-fPIC",
                "-nostdlib",
                "-x",
                "c",
                "-",
                f"-Wl,-soname,{name}",
                "-o",
                folder / name,
            ],
            text,
        )
    return folder


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"stubs: {name} is not installed for {sys.executable}; run make test-npu")
    return Path(spec.origin).parent


def _interpreter() -> list[Path]:
    """Where Python's own functions are: the executable or its shared library."""
    library = Path(sysconfig.get_config_var("LIBDIR") or ".") / (sysconfig.get_config_var("LDLIBRARY") or ".")
    return [
        path for path in (Path(sys.executable).resolve(), library) if path.is_file() and path.suffix != ".a"
    ]


def _symbols(libraries: list[Path], which: str) -> set[str]:
    """Dynamic symbols that are not weak; those with a version belong to the system's libraries."""
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
        raise SystemExit(f"stubs: {words[0]} is not installed; it comes with binutils or gcc") from error
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"stubs: {' '.join(words)} failed: {error.stderr.strip()}") from error


if __name__ == "__main__":
    print(build())
