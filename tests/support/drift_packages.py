"""Small packages on disk for the drift tests."""

from __future__ import annotations

import textwrap
from pathlib import Path

from mindspeed_dsa.patches.drift import Checker
from mindspeed_dsa.patches.source_tree import SourceTree
from mindspeed_dsa.patches.spec import Patch


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write ``{"megatron/core/x.py": source}``; packages get no ``__init__.py`` unless it is listed."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


def patch(target: str, kind: str = "wrap", **fields: object) -> Patch:
    """Return a patch row whose implementation is never loaded."""
    return Patch(target, kind, "implementation:function", "a test wants it", **fields)  # type: ignore[arg-type]


def checker(folder: Path, files: dict[str, str], **options: object) -> Checker:
    """Return a checker over files written below ``folder``."""
    return Checker(SourceTree.folder(write(folder, files)), **options)  # type: ignore[arg-type]
