"""Import hooks, which run a callback right after a module's import, and lookup of names in modules.

wrapt is imported on first use. It is half the import cost of this package, and is not needed while every
feature is off.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress
from types import ModuleType
from typing import Any

from mindspeed_dsa.patches.signatures import is_a

_module_dict: Callable[[ModuleType], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__


def namespace(module: Any) -> dict[str, Any] | None:
    """Return a module's dictionary without triggering lazy modules, or ``None`` if it is not a module."""
    return _module_dict(module) if is_a(module, ModuleType) else None


def execution(name: str) -> Any:
    """Return a module's ``__spec__``. A reload creates a new spec, so it identifies one execution."""
    return (namespace(sys.modules.get(name)) or {}).get("__spec__")


def is_loaded(name: str) -> bool:
    """Return whether the module has finished executing, or is lazy and executes on first access."""
    module = sys.modules.get(name)
    return module is not None and not is_initializing(module)


def is_initializing(module: Any) -> bool:
    """Return whether the module is still being executed, as seen from a circular import."""
    spec = (namespace(module) or {}).get("__spec__")
    return bool(getattr(spec, "_initializing", False))


def cannot_be_imported(name: str) -> bool:
    """Return whether no such module exists; never imports a parent package to find out."""
    parent = name.rpartition(".")[0]
    if name in sys.modules or (parent and not is_loaded(parent)):
        return False
    try:
        return importlib.util.find_spec(name) is None
    except (ImportError, AttributeError, ValueError):  # the parent is not a package
        return True


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call ``callback(module)`` right after ``name`` has been executed.

    If the module is already being executed, it cannot be hooked any more and the callback is never called.

    Args:
        name: dotted module name.
        callback: function that must not raise. An import hook that raises is lost, and the next import of the
            module succeeds without it.

    Returns:
        Function that drops the callback. wrapt cannot unregister the hook, which then does nothing.
    """
    import wrapt

    registering = threading.get_ident()
    callbacks = [callback]

    def hook(module: ModuleType) -> None:
        # wrapt calls the hook at once for a module that is in sys.modules, even if half executed.
        if registering == threading.get_ident() and is_initializing(module):
            return
        for notify in callbacks:
            notify(module)

    wrapt.register_post_import_hook(hook, name)
    # No thread has id 0. Calls from now on come after an import, when the module is complete.
    registering = 0
    return callbacks.clear


def resolve(name: str, path: str) -> tuple[Any, str, Any]:
    """Return owner, attribute name and object of ``path`` in a loaded module, bypassing descriptors.

    Raises:
        Exception: no such attribute exists, or the module's own ``__getattr__`` raised.
    """
    import wrapt

    found: tuple[Any, str, Any] = wrapt.resolve_path(sys.modules[name], path)
    return found


def namespaces(since: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the dictionaries of loaded modules.

    Args:
        since: name of a module that has just been executed. Modules that were complete before its execution
            began precede it in ``sys.modules`` and cannot have imported its names, so they are skipped.
    """
    # sys.modules is in the order in which imports began.
    started = since is None
    for name, module in sys.modules.copy().items():
        started = started or name == since
        if (started or is_initializing(module)) and issubclass(type(module), ModuleType):
            yield _module_dict(module)


def bound_names(
    wanted: Mapping[int, Any], since: str | None = None
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield every module-level name bound to one of the ``wanted`` objects, as ``(namespace, name, value)``.

    Args:
        wanted: objects to look for, by ``id``. Identity finds aliases, and ignores unrelated objects of the
            same name.
        since: module that has just been executed, see :func:`namespaces`.
    """
    ids = frozenset(wanted)
    for names in namespaces(since):
        if _without(ids, names):
            continue
        held = names.copy()
        for name in compress(held, map(ids.__contains__, map(id, held.values()))):
            if id(value := names.get(name)) in ids:
                yield names, name, value


def bound_as(wanted: Iterable[tuple[Any, Any]]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield ``(namespace, name, value)`` wherever a module binds one of these names to its object."""
    wanted = [(name, thing) for name, thing in wanted if thing is not None]
    for names in namespaces() if wanted else ():
        for name, thing in wanted:
            if names.get(name) is thing:
                yield names, name, thing


def _without(ids: frozenset[int], names: dict[str, Any]) -> bool:
    """Return whether none of a dictionary's values has one of these ids."""
    try:
        return ids.isdisjoint(map(id, names.values()))
    except RuntimeError:
        # The dictionary grew: another thread, or a garbage collector callback, is importing a module.
        return ids.isdisjoint(map(id, names.copy().values()))
