"""A Megatron under another root than ``megatron``, known by what the job imports.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from mindspeed_dsa.patches import versions

_CORE = ".core"


def imported() -> str | None:
    """Return the root of a fork that has been imported; ``None`` without one, or beside stock Megatron."""
    if f"megatron{_CORE}" in sys.modules:
        return None
    for name, module in sys.modules.copy().items():
        if _may_be_core(name) and _holds_core(getattr(module, "__path__", None)):
            return name.removesuffix(_CORE)
    return None


class Watch:
    """Waits for the import of a fork, and says so before any module of it is executed.

    Args:
        found: called once with the fork's root; not if stock Megatron is imported first.
    """

    def __init__(self, found: Callable[[str], None]) -> None:
        self._found: Callable[[str], None] | None = found
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Wait no longer."""
        self._found = None
        # Another list: an import that goes through the old one would pass over our neighbour.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Part of the import system; finds nothing itself."""
        if name == f"megatron{_CORE}" or f"megatron{_CORE}" in sys.modules:
            self.end()
        elif _may_be_core(name) and self._found and _holds_core(Path(each, "core") for each in path or ()):
            found = self._found
            self.end()
            found(name.removesuffix(_CORE))
        return None


def _may_be_core(name: str) -> bool:
    return name.endswith(_CORE) and name.count(".") == 1 and name != f"megatron{_CORE}"


def _holds_core(folders: Iterable[str | Path] | None) -> bool:
    """Return whether Megatron-core lies in one of these folders, by its version file and its models."""
    for folder in map(Path, folders or ()):
        file = folder / "package_info.py"
        if (folder / "models" / "common" / "language_module").is_dir() and file.is_file():
            return versions.version_in_source(file.read_text(encoding="utf-8")) is not None
    return False
