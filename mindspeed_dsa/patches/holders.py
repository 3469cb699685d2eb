"""Objects that still hold an original after it was patched, named by following references to it backwards.

Found is what no assignment can reach: default arguments, closures, containers, bound methods, class
attributes, instances. What the garbage collector does not track is not: local variables of running functions
(they disappear by themselves), objects that only C code holds, and everything that existed before a
``gc.freeze()``.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import (
    AsyncGeneratorType,
    CellType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GenericAlias,
    MappingProxyType,
    MethodType,
    TracebackType,
    UnionType,
)
from typing import Any

from mindspeed_dsa.patches import hooks
from mindspeed_dsa.patches.compose import is_made_by_patch
from mindspeed_dsa.patches.signatures import is_a

_LRU = type(functools.lru_cache(hooks.namespace))
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, MappingProxyType)
_WRAPPERS = (
    staticmethod,
    classmethod,
    property,
    functools.partial,
    functools.partialmethod,
    MethodType,
    _LRU,
)
# Running code: a local variable disappears by itself.
_RUNNING = (FrameType, GeneratorType, CoroutineType, AsyncGeneratorType, TracebackType)
_IGNORED = (*_RUNNING, GenericAlias, UnionType, weakref.ref)
# Instances of these modules' classes do not call what they hold: iterators, annotations, caches of
# signatures, and the engine's own bookkeeping.
_SILENT = ("builtins", "itertools", "typing", "inspect", "dataclasses", "abc", "_abc", "annotationlib")
_ENGINE = __name__.rpartition(".")[0]


@dataclass(frozen=True, eq=False, slots=True)
class Path:
    """Objects of which each holds the one before; the first is the original."""

    chain: tuple[Any, ...]

    @property
    def original(self) -> Any:
        """The held object."""
        return self.chain[0]

    @property
    def end(self) -> Any:
        """The outermost holder found so far."""
        return self.chain[-1]


def module_names() -> dict[int, str]:
    """Names of the loaded modules by ``id`` of their dictionaries."""
    modules = tuple(sys.modules.items())
    return {id(names): name for name, module in modules if (names := hooks.namespace(module)) is not None}


def step(path: Path, holder: Any, modules: Mapping[int, str]) -> str | Path | None:
    """Go from the end of a path to one of its holders.

    Returns:
        A name, if the holder has one that a reader can search for; a longer path, if it is only a container;
        ``None`` if the reference is harmless.
    """
    child = path.end
    if is_a(holder, _IGNORED):
        return None
    if is_a(holder, dict) and (id(holder) in modules or "__builtins__" in holder):
        return _in_module(path, holder, modules.get(id(holder)))
    if is_a(holder, FunctionType):
        return _in_function(path, holder)
    if is_a(holder, type):
        return _in_class(path, holder)
    if is_a(holder, CellType):
        return Path((*path.chain, holder))
    if is_a(holder, dict) and _key(holder, child) in (None, "__annotations__"):
        return None  # a key is looked up, not called
    if is_a(holder, _CONTAINERS):
        return Path((*path.chain, holder))
    if is_a(holder, _WRAPPERS):
        # A tuple in a cache is the arguments of a call.
        return None if is_a(holder, _LRU) and is_a(child, tuple) else Path((*path.chain, holder))
    return _in_instance(path, holder)


def _in_module(path: Path, names: dict[str, Any], module: str | None) -> str | None:
    key = _key(names, path.end)
    if key is None:
        return None
    if module is None:
        return _written(path, f"{names.get('__name__')}.{key}") + " (of a module that is not in sys.modules)"
    return _written(path, f"{module}.{key}")


def _in_function(path: Path, function: FunctionType) -> str | None:
    child, inner = path.end, path.chain[-2] if len(path.chain) > 1 else None
    if _is_part_of(function, path.original) or is_made_by_patch(function):
        return None
    name, code = function_name(function), function.__code__
    if function.__closure__ is not None and child is function.__closure__:
        index = next(i for i, cell in enumerate(function.__closure__) if cell is inner)
        return _written(path, f"the closure of {name} (variable {code.co_freevars[index]})", 2) + _alias(
            function
        )
    if function.__defaults__ is not None and child is function.__defaults__:
        index = next(i for i, default in enumerate(function.__defaults__) if default is inner)
        parameter = code.co_varnames[code.co_argcount - len(function.__defaults__) + index]
        return _written(path, f"the default argument of {name} (parameter {parameter})", 1)
    if function.__kwdefaults__ is not None and child is function.__kwdefaults__:
        key = _key(child, inner)
        return _written(path, f"the default argument of {name} (parameter {key})", 1)
    if child is function.__dict__:
        key = _key(child, inner)
        # A wrapper calls what is in its closure; __wrapped__ is only informative.
        return None if key == "__wrapped__" else _written(path, f"{name}.{key}", 1)
    return None  # annotations


def _in_class(path: Path, cls: type) -> str | None:
    child, inner = path.end, path.chain[-2] if len(path.chain) > 1 else None
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls is path.original:
        return None
    if child is path.original:
        return f"{name} (a subclass)" if child in cls.__bases__ else None
    if is_a(child, dict):
        key = _key(child, inner)
        if key is not None and vars(cls).get(key) is inner and key != "__annotations__":
            return _written(path, f"{name}.{key}", 1)
    return None


def _in_instance(path: Path, holder: Any) -> str | None:
    cls = type(holder)
    if cls.__module__ in _SILENT or cls.__module__.startswith(_ENGINE):
        return None
    name = f"{cls.__module__}.{cls.__qualname__}"
    own = _instance_dict(holder)
    if own is not None and path.end is own:
        return f"a {name} (attribute {_written(path, str(_key(own, path.chain[-2])), 1)})"
    attribute = _key(own or {}, path.end) or _slot(holder, path.end)
    if attribute is not None:
        return f"a {name} (attribute {_written(path, attribute)})"
    # Every instance holds its class.
    return None if cls is path.end else f"a {name}"


def function_name(function: FunctionType) -> str:
    """Name of the code: functools.wraps gives a wrapper the name of the original."""
    wraps = "__wrapped__" in function.__dict__
    here = function.__code__.co_name if wraps else function.__qualname__
    name = getattr(function.__code__, "co_qualname", here)  # since Python 3.11
    return f"{function.__globals__.get('__name__')}.{name}"


def _alias(function: FunctionType) -> str:
    """A module-level name of a function that was made by another one."""
    for names, name, _ in hooks.bound_names({id(function): function}):
        return f", which is {names.get('__name__')}.{name}"
    return ""


def _is_part_of(function: FunctionType, original: Any) -> bool:
    """Return whether a function is the original itself, or a method of it that knows its class."""
    if isinstance(original, type):
        inside = function.__qualname__.startswith(f"{original.__qualname__}.")
        return inside and function.__module__ == original.__module__
    return function is original


def _written(path: Path, root: str, inside: int = 0) -> str:
    """The path from a root down to the original, as an expression.

    Args:
        path: objects from the original up.
        root: text for one of them, or for the holder of the last.
        inside: how many steps from the end of the path that one is; 0 for the holder of the last.
    """
    text = root
    chain = path.chain[: len(path.chain) - inside]
    for child, holder in zip(chain[-2::-1], chain[:0:-1], strict=True):
        if is_a(holder, (dict, MappingProxyType)):
            text += f"[{_key(holder, child)!r}]"
        elif is_a(holder, (list, tuple, deque)):
            text += f"[{next((i for i, item in enumerate(holder) if item is child), '?')}]"
        elif is_a(holder, functools.partial):
            text += ".func" if holder.func is child else ""
        elif is_a(holder, MethodType):
            text += ".__func__" if holder.__func__ is child else ".__self__"
    return text


def described(path: Path) -> str:
    """A path without a root, if no better name is known."""
    return _written(path, f"a {type(path.end).__qualname__}")


def _key(mapping: Mapping[Any, Any], value: Any) -> Any:
    return next((key for key, held in tuple(mapping.items()) if held is value), None)


def _instance_dict(holder: Any) -> dict[str, Any] | None:
    try:
        own = object.__getattribute__(holder, "__dict__")
    except Exception:  # slots, or a class with custom attribute access
        return None
    return own if isinstance(own, dict) else None


def _slot(holder: Any, value: Any) -> str | None:
    for cls in type(holder).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            try:
                if object.__getattribute__(holder, name) is value:
                    return str(name)
            except Exception:  # not filled
                continue
    return None


_DEPTH = 6  # containers between an original and something with a name
_WIDTH = 500  # paths followed at once


@dataclass(frozen=True)
class StaleReference:
    """One holder of one original, named so that a reader can search for it."""

    original: Any
    holder: str


def find(originals: list[Any], own: Iterable[Any]) -> list[StaleReference]:
    """Search the garbage collector's heap for holders of the ``originals``.

    Args:
        originals: functions or classes that were replaced.
        own: objects of the engine itself that hold originals on purpose.
    """
    wanted = list({id(original): original for original in originals}.values())
    ours = list({id(thing): thing for thing in (*own, wanted, originals)}.values())
    suspects = held_by_others(wanted, ours)
    return _search(suspects, ours) if suspects else []


def held_by_others(wanted: list[Any], ours: list[Any]) -> list[Any]:
    """Objects with more references than our own; counting is far cheaper than searching.

    Args:
        wanted: objects, each of them once.
        ours: all that holds them on purpose, each once, the list ``wanted`` included; what the caller's
        variables hold counts as others'.
    """
    explained = Counter(map(id, gc.get_referents(*ours)))
    candidates = [*wanted, object()]
    excess = [sys.getrefcount(candidate) - explained[id(candidate)] for candidate in candidates]
    nobody_else = excess.pop()  # references of an object that only this function holds
    return [candidate for candidate, count in zip(wanted, excess, strict=True) if count > nobody_else]


def _search(suspects: list[Any], ours: list[Any]) -> list[StaleReference]:
    """Follow references backwards, all suspects at once, up to holders that have a name."""
    modules = module_names()
    bookkeeping = [suspects, ours, *ours]
    found: dict[tuple[int, str], StaleReference] = {}
    paths = [Path((original,)) for original in suspects]
    for _ in range(_DEPTH):
        paths = _one_level(paths[:_WIDTH], modules, bookkeeping, found)
        if not paths:
            break
    for path in paths:
        name = f"{described(path)}, deep inside other containers"
        found.setdefault((id(path.original), name), StaleReference(path.original, name))
    return list(found.values())


def _one_level(
    paths: list[Path],
    modules: Mapping[int, str],
    bookkeeping: list[Any],
    found: dict[tuple[int, str], StaleReference],
) -> list[Path]:
    """Extend all paths by one holder; those that reach a name go to ``found``."""
    by_end: dict[int, list[Path]] = {}
    for path in paths:
        by_end.setdefault(id(path.end), []).append(path)
    # A tuple, because it is passed on as it is and can be ignored below; Python 3.13 reports the arguments.
    ends = tuple(group[0].end for group in by_end.values())
    ignored = {id(thing) for thing in (*bookkeeping, bookkeeping, found, paths, ends)}
    ignored |= {id(path.chain) for path in paths}
    longer: dict[tuple[int, int], Path] = {}
    for holder in gc.get_referrers(*ends):
        if id(holder) in ignored:
            continue
        for end in {id(thing) for thing in gc.get_referents(holder)} & by_end.keys():
            for path in by_end[end]:
                if any(holder is thing for thing in path.chain):
                    continue  # a cycle
                result = step(path, holder, modules)
                if isinstance(result, str):
                    found.setdefault((id(path.original), result), StaleReference(path.original, result))
                elif result is not None:
                    longer.setdefault((id(path.original), id(holder)), result)
    return list(longer.values())
