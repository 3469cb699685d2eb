"""When to patch: now, or the moment a module has been executed and nobody has bound its names yet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import wrapt

_module_dict = ModuleType.__dict__["__dict__"].__get__


def namespace(module: Any) -> dict[str, Any] | None:
    """A module's dictionary without waking lazy modules; ``None`` for things that are no module."""
    return _module_dict(module) if isinstance(module, ModuleType) else None


def is_loaded(name: str) -> bool:
    """Whether the module has been executed to its end."""
    module = sys.modules.get(name)
    return module is not None and not is_initializing(module)


def is_initializing(module: Any) -> bool:
    """Whether the module is on the import stack right now (a circular import sees it half done)."""
    spec = (namespace(module) or {}).get("__spec__")
    return bool(getattr(spec, "_initializing", False))


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call ``callback(module)`` right after ``name`` has been executed.

    ``callback`` must not raise: an import hook that raises is lost, and the next import of the
    module succeeds without it.
    """
    wrapt.register_post_import_hook(callback, name)


def namespaces(since: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and dictionaries of the loaded modules, in the order in which their import began.

    Args:
        since: start at this module. What was imported before a module was cannot hold names of it,
            unless it is still being executed itself; those are included.
    """
    started = since is None
    for name, module in tuple(sys.modules.items()):
        started = started or name == since
        if started or is_initializing(module):
            found = namespace(module)
            if found is not None:
                yield name, found


def holders(wanted: Mapping[int, Any], since: str | None = None) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Every module-level name bound to one of the ``wanted`` objects: ``(namespace, name, value)``.

    Args:
        wanted: objects to look for, by ``id``; identity finds aliases and cannot be fooled by
            equal names.
        since: as for :func:`namespaces`.
    """
    for _, names in namespaces(since):
        items = tuple(names.items())  # another thread may import meanwhile
        for name, value in items:
            if id(value) in wanted and wanted[id(value)] is value:
                yield names, name, value
