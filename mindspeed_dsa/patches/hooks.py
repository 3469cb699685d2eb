"""When to patch: now, or right after a module has been executed and before its names are bound elsewhere.

wrapt is imported when it is needed: it is half of what importing this package would cost, and it is not
needed while no feature is on.
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
    """A module's dictionary without waking lazy modules; ``None`` for objects that are not modules."""
    return _module_dict(module) if is_a(module, ModuleType) else None


def execution(name: str) -> Any:
    """An object that identifies the last execution of a module; a reload makes a new one."""
    return (namespace(sys.modules.get(name)) or {}).get("__spec__")


def is_loaded(name: str) -> bool:
    """Return whether the module has been executed to its end (or is lazy, and will be on first access)."""
    module = sys.modules.get(name)
    return module is not None and not is_initializing(module)


def is_initializing(module: Any) -> bool:
    """Return whether the module is on the import stack (a circular import sees it half executed)."""
    spec = (namespace(module) or {}).get("__spec__")
    return bool(getattr(spec, "_initializing", False))


def cannot_be_imported(name: str) -> bool:
    """Return whether there is no such module; queries the finders, but only if that imports no parent."""
    parent = name.rpartition(".")[0]
    if name in sys.modules or (parent and not is_loaded(parent)):
        return False
    try:
        return importlib.util.find_spec(name) is None
    except (ImportError, AttributeError, ValueError):  # the parent is not a package
        return True


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call ``callback(module)`` right after ``name`` has been executed.

    A module that is currently being executed cannot be hooked any more; the callback is then not called.

    Args:
        name: dotted module name.
        callback: must not raise: an import hook that raises is lost, and the next import of the
            module succeeds without it.

    Returns:
        What lets go of the callback; the hook itself cannot be unregistered, and does nothing from then on.
    """
    import wrapt

    registering = threading.get_ident()
    callbacks = [callback]

    def hook(module: ModuleType) -> None:
        # wrapt calls at once for every module in sys.modules, including half-executed ones.
        if registering == threading.get_ident() and is_initializing(module):
            return
        for each in callbacks:
            each(module)

    wrapt.register_post_import_hook(hook, name)
    registering = 0
    return callbacks.clear


def resolve(name: str, path: str) -> tuple[Any, str, Any]:
    """Owner, attribute name and object of ``path`` in a loaded module, bypassing descriptors.

    Raises:
        Exception: there is no such attribute; a module's own ``__getattr__`` may raise anything.
    """
    import wrapt

    found: tuple[Any, str, Any] = wrapt.resolve_path(sys.modules[name], path)
    return found


def namespaces(since: str | None = None) -> Iterator[dict[str, Any]]:
    """Dictionaries of the loaded modules.

    Args:
        since: a module that has just been executed. Modules that were complete when its execution
            began (they precede it in ``sys.modules``) cannot have imported its names, so they are skipped.
    """
    started = since is None
    for name, module in sys.modules.copy().items():
        started = started or name == since
        if (started or is_initializing(module)) and issubclass(type(module), ModuleType):
            yield _module_dict(module)


def bound_names(
    wanted: Mapping[int, Any], since: str | None = None
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Every module-level name bound to one of the ``wanted`` objects: ``(namespace, name, value)``.

    Args:
        wanted: objects to look for, by ``id``; identity finds aliases and cannot be fooled by
            equal names.
        since: as for :func:`namespaces`.
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
    """The same for pairs of a name and what may be bound to it, ``None`` excepted."""
    wanted = [(name, thing) for name, thing in wanted if thing is not None]
    for names in namespaces() if wanted else ():
        for name, thing in wanted:
            if names.get(name) is thing:
                yield names, name, thing


def _without(ids: frozenset[int], names: dict[str, Any]) -> bool:
    """Return whether no value of a dictionary is one of the objects with these ids."""
    try:
        return ids.isdisjoint(map(id, names.values()))
    except RuntimeError:
        # It grew: another thread imports a module, or a callback of the garbage collector does.
        return ids.isdisjoint(map(id, names.copy().values()))
