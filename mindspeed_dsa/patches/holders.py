"""Search for objects that still hold an original function after it was patched.

References to the original are followed backwards through ``gc.get_referrers``. Holders that cannot be rebound
are default arguments, closures, containers, bound methods, class attributes and instances. Module globals,
closures, class attributes, default arguments and dictionary keys are reported by their exact name, other
holders by type and module. The garbage collector does not track the following, so the search misses them:

* local variables of running functions, which disappear by themselves,
* objects that only C code holds,
* objects that existed before a ``gc.freeze()``.
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
_CONTAINERS = (
    *(dict, list, tuple, set, frozenset, deque, MappingProxyType, CellType),
    *(staticmethod, classmethod, property, functools.partial, functools.partialmethod, MethodType, _LRU),
)
# Frames of running code: their local variables disappear by themselves.
_RUNNING = (FrameType, GeneratorType, CoroutineType, AsyncGeneratorType, TracebackType)
_IGNORED = (*_RUNNING, GenericAlias, UnionType, weakref.ref)
# Instances of classes in these modules do not call the objects that they hold: iterators, annotations,
# signature caches, and the engine's own bookkeeping.
_SILENT = ("builtins", "itertools", "typing", "inspect", "dataclasses", "abc", "_abc", "annotationlib")
_ENGINE = __name__.rpartition(".")[0]
_DEPTH = 6  # most containers between an original and a named holder
_WIDTH = 500  # most paths followed at once

_Path = tuple[Any, ...]
"""Chain of references: the first object is the original, and each object is held by the next."""


@dataclass(frozen=True)
class StaleReference:
    """Object that still holds an original, described so that a user can find it in source code."""

    original: Any
    holder: str


def find(originals: list[Any], own: Iterable[Any]) -> list[StaleReference]:
    """Search the garbage collector's heap for holders of the ``originals``.

    Args:
        originals: functions or classes that were replaced.
        own: engine objects that hold originals on purpose.
    """
    wanted = list({id(original): original for original in originals}.values())
    ours = list({id(thing): thing for thing in (*own, wanted, originals)}.values())
    suspects = held_by_others(wanted, ours)
    return _search(suspects, ours) if suspects else []


def held_by_others(wanted: list[Any], ours: list[Any]) -> list[Any]:
    """Return the objects of ``wanted`` that objects outside of the engine also hold.

    Counting references is far cheaper than searching for the holders.

    Args:
        wanted: objects to count references of, without duplicates.
        ours: all objects that hold ``wanted`` on purpose, without duplicates and including the list
            ``wanted``. References from the caller's variables count as foreign.
    """
    explained = Counter(map(id, gc.get_referents(*ours)))
    candidates = [*wanted, object()]
    excess = [sys.getrefcount(candidate) - explained[id(candidate)] for candidate in candidates]
    nobody_else = excess.pop()  # baseline: references to an object that only this function holds
    return [candidate for candidate, count in zip(wanted, excess, strict=True) if count > nobody_else]


def function_name(function: FunctionType) -> str:
    """Return a function's module and name from its code, because functools.wraps overwrites ``__name__``."""
    wraps = "__wrapped__" in function.__dict__
    here = function.__code__.co_name if wraps else function.__qualname__
    name = getattr(function.__code__, "co_qualname", here)  # since Python 3.11
    return f"{function.__globals__.get('__name__')}.{name}"


def _search(suspects: list[Any], ours: list[Any]) -> list[StaleReference]:
    """Follow references backwards from all suspects at once, until a holder has a name."""
    # Copy, because an import in another thread changes sys.modules.
    loaded = sys.modules.copy().items()
    modules = {id(names): name for name, module in loaded if (names := hooks.namespace(module)) is not None}
    bookkeeping = [suspects, ours, *ours]
    references: dict[tuple[int, str], StaleReference] = {}
    paths: list[_Path] = [(original,) for original in suspects]
    for _ in range(_DEPTH):
        paths = _one_level(paths[:_WIDTH], modules, bookkeeping, references)
        if not paths:
            break
    # Paths without a named holder after _DEPTH steps.
    for path in paths:
        name = f"a {type(path[-1]).__qualname__}, deep inside other containers"
        references.setdefault((id(path[0]), name), StaleReference(path[0], name))
    # The heap's order differs from one search to the next.
    return sorted(references.values(), key=lambda reference: reference.holder)


def _one_level(
    paths: list[_Path],
    modules: Mapping[int, str],
    bookkeeping: list[Any],
    found: dict[tuple[int, str], StaleReference],
) -> list[_Path]:
    """Extend all paths by one holder, and add paths that reach a named holder to ``found``."""
    by_end: dict[int, list[_Path]] = {}
    for path in paths:
        # Several originals can share a holder; query its referrers only once.
        by_end.setdefault(id(path[-1]), []).append(path)
    # A tuple is passed on as is, so it can be ignored below. Python 3.13 reports call arguments as referrers.
    ends = tuple(group[0][-1] for group in by_end.values())
    ignored = {id(thing) for thing in (*bookkeeping, bookkeeping, found, paths, ends, *paths)}
    longer: dict[tuple[int, int], _Path] = {}
    for holder in gc.get_referrers(*ends):
        if id(holder) in ignored:
            continue
        for end in {id(thing) for thing in gc.get_referents(holder)} & by_end.keys():
            for path in by_end[end]:
                if any(holder is thing for thing in path):
                    continue  # a cycle
                result = _step(path, holder, modules)
                if isinstance(result, str):
                    found.setdefault((id(path[0]), result), StaleReference(path[0], result))
                elif result is not None:
                    longer.setdefault((id(path[0]), id(holder)), result)
    return list(longer.values())


def _step(path: _Path, holder: Any, modules: Mapping[int, str]) -> str | _Path | None:
    """Return the holder's name, the path extended by a container, or ``None`` for a harmless holder."""
    child = path[-1]
    if is_a(holder, _IGNORED):
        return None
    if is_a(holder, dict):
        key = _key(holder, child)
        if id(holder) in modules or "__builtins__" in holder:
            module = modules.get(id(holder))
            gone = "" if module else " (of a module that is not in sys.modules)"
            name = f"{module or holder.get('__name__')}.{key}{_keys(path)}{gone}"
            return None if key is None else name
        # Dictionary keys are only looked up, never called.
        return None if key in (None, "__annotations__") else (*path, holder)
    if is_a(holder, FunctionType):
        return _in_function(path, holder)
    if is_a(holder, type):
        return _in_class(path, holder)
    if is_a(holder, _CONTAINERS):
        # A tuple in an lru_cache holds the arguments of a cached call.
        return None if is_a(holder, _LRU) and is_a(child, tuple) else (*path, holder)
    cls = type(holder)
    if cls is child or cls.__module__ in _SILENT or cls.__module__.startswith(_ENGINE):
        return None  # every instance holds its class
    return f"a {cls.__module__}.{cls.__qualname__}"


def _in_function(path: _Path, function: FunctionType) -> str | None:
    child, inner = path[-1], path[-2] if len(path) > 1 else None
    if _is_part_of(function, path[0]) or is_made_by_patch(function):
        return None
    name, code = function_name(function), function.__code__
    if function.__closure__ is not None and child is function.__closure__:
        index = next(i for i, cell in enumerate(function.__closure__) if cell is inner)
        return f"the closure of {name} (variable {code.co_freevars[index]}){_keys(path[:-2])}"
    if function.__defaults__ is not None and child is function.__defaults__:
        index = next(i for i, default in enumerate(function.__defaults__) if default is inner)
        parameter = code.co_varnames[code.co_argcount - len(function.__defaults__) + index]
        return f"the default argument of {name} (parameter {parameter}){_keys(path[:-1])}"
    if function.__kwdefaults__ is not None and child is function.__kwdefaults__:
        return f"the default argument of {name} (parameter {_key(child, inner)}){_keys(path[:-1])}"
    # A wrapper calls the objects in its closure. __wrapped__ and annotations are only informative.
    key = _key(child, inner) if child is function.__dict__ else "__wrapped__"
    return None if key == "__wrapped__" else f"{name}.{key}{_keys(path[:-1])}"


def _in_class(path: _Path, cls: type) -> str | None:
    child, inner = path[-1], path[-2] if len(path) > 1 else None
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls is path[0]:
        return None
    if child is path[0]:
        return f"{name} (a subclass)" if child in cls.__bases__ else None
    key = _key(child, inner) if is_a(child, dict) else None
    if key in (None, "__annotations__") or vars(cls).get(key) is not inner:
        return None
    return f"{name}.{key}{_keys(path[:-1])}"


def _is_part_of(function: FunctionType, original: Any) -> bool:
    """Return whether a function is the original itself, or a method of the original class."""
    if isinstance(original, type):
        inside = function.__qualname__.startswith(f"{original.__qualname__}.")
        return inside and function.__module__ == original.__module__
    return function is original


def _keys(path: _Path) -> str:
    """Format the keys of the outermost dictionaries of a path as subscripts."""
    text = ""
    for child, holder in zip(path[-2::-1], path[:0:-1], strict=True):
        if not is_a(holder, (dict, MappingProxyType)):
            break
        text += f"[{_key(holder, child)!r}]"
    return text


def _key(mapping: Mapping[Any, Any], value: Any) -> Any:
    return next((key for key, held in tuple(mapping.items()) if held is value), None)
