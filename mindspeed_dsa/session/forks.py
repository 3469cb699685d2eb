"""Detection of Megatron forks with another root package than ``megatron``, from the job's imports.

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
    """Return the root package of an imported fork; ``None`` without a fork or if stock Megatron is loaded."""
    if f"megatron{_CORE}" in sys.modules:
        return None
    for name, module in sys.modules.copy().items():
        if _may_be_core(name) and _holds_core(getattr(module, "__path__", None)):
            return name.removesuffix(_CORE)
    return None


class Watch:
    """Import finder that calls a function when a fork is imported, before any of its modules is executed.

    Args:
        found: function that is called once with the fork's root, unless stock Megatron is imported first.
    """

    def __init__(self, found: Callable[[str], None]) -> None:
        self._found: Callable[[str], None] | None = found
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Remove the finder."""
        self._found = None
        # Build a new list: an import that is iterating over the old one would skip the next finder.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Called for every import; always returns None, so that other finders load the module."""
        if name == f"megatron{_CORE}" or f"megatron{_CORE}" in sys.modules:
            self.end()
        elif _may_be_core(name) and self._found and _holds_core(Path(each, "core") for each in path or ()):
            callback = self._found
            self.end()
            callback(name.removesuffix(_CORE))
        return None


def _may_be_core(name: str) -> bool:
    # Exactly one dot: corp_megatron.core, but not corp.megatron.core.
    return name.endswith(_CORE) and name.count(".") == 1 and name != f"megatron{_CORE}"


def _holds_core(folders: Iterable[str | Path] | None) -> bool:
    """Return whether one of these folders is Megatron-core: has its version file and its language models."""
    for folder in map(Path, folders or ()):
        file = folder / "package_info.py"
        if (folder / "models" / "common" / "language_module").is_dir() and file.is_file():
            return versions.version_in_source(file.read_text(encoding="utf-8")) is not None
    return False
