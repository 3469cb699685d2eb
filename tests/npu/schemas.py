"""Schemas of the operators that this package calls, from published wheels of torch_npu.

``python tests/npu/schemas.py`` downloads the wheels one after the other and reads the file that lists their
operators, without importing anything. It writes ``schemas.json``: releases by operator and schema. Paths of
wheels may be given as arguments. :func:`hold_calls` checks every call against all of them.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_dsa.platforms.npu_operators import BY_NAME

FILE = Path(__file__).with_name("schemas.json")
# The oldest allowed by setup.py, the first with DSA's operators for PyTorch 2.7, two of 2.9, the newest two.
RELEASES = ("2.6.0", "2.7.1.post2", "2.9.0.post4", "2.9.0.post9", "2.13.0", "2.14.0")
_LIST = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
_LINE = re.compile(r"^[- ] func: ((\w+)(?:\.\w+)?\(.*)$", re.MULTILINE)


def read(wheel: Path) -> list[tuple[str, str]]:
    """Return operators and schemas, one for each overload."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(_LIST).decode()
    return [(name, schema.strip()) for schema, name in _LINE.findall(text) if name in BY_NAME]


def _download(release: str, folder: str) -> Path:
    # For any Python: nothing is installed.
    tags = ("--python-version", "3.11", "--implementation", "cp")
    platforms = [f"--platform=manylinux{tag}_x86_64" for tag in ("_2_28", "_2_17", "2014")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, *tags, *platforms, "--dest", folder, f"torch_npu=={release}"], check=True)
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def _all(given: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    by_release = {Path(wheel).name.split("-")[1]: Path(wheel) for wheel in given}
    table: dict[str, dict[str, list[str]]] = {}
    for release in RELEASES:
        with tempfile.TemporaryDirectory() as folder:
            for name, schema in read(by_release.get(release) or _download(release, folder)):
                table.setdefault(name, {}).setdefault(schema, []).append(release)
    return dict(sorted(table.items()))


@cache
def table() -> dict[str, dict[str, list[str]]]:
    """Return releases by operator and schema."""
    found: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def releases_of(name: str) -> list[str]:
    """Return the :data:`RELEASES` that have an operator."""
    having = {release for releases in table()[name].values() for release in releases}
    return [release for release in RELEASES if release in having]


def require_fit(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``AssertionError`` unless every release with the operator takes this call."""
    problems: dict[str, list[str]] = {release: [] for release in releases_of(name)}
    for schema, releases in table()[name].items():
        problem = _misfit(schema, args, dict(kwargs))
        for release in releases:
            problems[release].append(problem)
    # One matching overload is enough.
    wrong = {release: texts[0] for release, texts in problems.items() if all(texts)}
    assert not wrong, f"{name} is called as some releases of torch_npu do not have it: {wrong}"


@cache
def _parsed(schema: str) -> Any:
    import torch

    return torch._C.parse_schema(f"npu::{schema}")


def _misfit(schema: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    arguments = _parsed(schema).arguments
    if isinstance(kwargs.get("out"), tuple):
        # Python's form of an overload that writes to given tensors.
        written = [argument.name for argument in arguments if argument.is_out]
        kwargs.update(zip(written, kwargs.pop("out"), strict=True)) if written else None
    parameters = [
        inspect.Parameter(
            f"{argument.name}_" if argument.name == "self" else argument.name,
            inspect.Parameter.KEYWORD_ONLY
            if argument.kwarg_only
            else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
        )
        for argument in arguments
    ]
    try:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    by_name = {parameter.name: argument for parameter, argument in zip(parameters, arguments, strict=True)}
    for name, value in bound.arguments.items():
        if not _suits(value, str(by_name[name].type)):
            return f"{name} is {by_name[name].type}, not {type(value).__name__}"
    return ""


def _suits(value: Any, kind: str) -> bool:
    import torch

    optional = kind.startswith("Optional[")
    kind = kind.removeprefix("Optional[").removesuffix("]") if optional else kind
    if value is None:
        return optional
    if kind.startswith("List["):
        inner = kind.removeprefix("List[").removesuffix("]")
        return isinstance(value, (list, tuple)) and all(_suits(each, inner) for each in value)
    # The parser gives dtypes the type of their number.
    types: dict[str, Any] = {"Tensor": torch.Tensor, "str": str, "bool": bool, "int": (int, torch.dtype)}
    types |= {"float": (int, float), "number": (int, float), "Device": torch.device}
    return isinstance(value, types.get(kind, object))


def hold_calls() -> list[str]:
    """Check every call of an operator of torch_npu against all releases from now on.

    Both names are replaced: in ``torch.ops.npu``, and in the package.

    Returns:
        Names of the operators that are called, in order.
    """
    import torch
    import torch_npu

    seen: list[str] = []
    for name in BY_NAME:
        setattr(torch.ops.npu, name, _Held(name, getattr(torch.ops.npu, name), seen))
        if hasattr(torch_npu, name):
            setattr(torch_npu, name, _Held(name, getattr(torch_npu, name), seen))
    return seen


class _Held:
    """Operator whose calls are checked against all releases; other attributes are the operator's."""

    def __init__(self, name: str, original: Any, seen: list[str]) -> None:
        self._name, self._original, self._seen = name, original, seen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        require_fit(self._name, args, kwargs)
        self._seen.append(self._name)
        return self._original(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


if __name__ == "__main__":
    FILE.write_text(json.dumps(_all(sys.argv[1:]), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {FILE}")
