"""Search for our patch inside a wrapper that other code has installed over it.

A decorator holds the wrapped function in a closure, a default argument, an attribute, an argument of a
partial, or under a global name that its code uses. The search follows all of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial, partialmethod
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from mindspeed_dsa.patches import compose
from mindspeed_dsa.patches.signatures import is_a

_MOST = 5000  # most objects visited
_DEPTH = 8  # most references between the callable and our patch


def reaches(live: Any, ours: Any) -> bool:
    """Return whether ``live`` holds ``ours``, directly or indirectly.

    Args:
        live: object that a lookup of the target returns.
        ours: object that the engine installed.
    """
    wanted = {id(ours), id(compose.underlying(ours))}
    home = getattr(compose.underlying(live), "__globals__", None)
    queue, seen = deque([(live, 0)]), set[int]()
    kept = []  # keeps visited objects alive, so that no id is reused
    while queue and len(seen) < _MOST:
        thing, depth = queue.popleft()
        if id(thing) in wanted:
            return True
        if id(thing) in seen or depth > _DEPTH:
            continue
        seen.add(id(thing))
        kept.append(thing)
        queue.extend((held, depth + 1) for held in _held(thing, home))
    return False


def _held(thing: Any, home: Any) -> Iterator[Any]:
    if thing is None or is_a(thing, (str, bytes, int, float, CodeType, ModuleType)):
        return
    if is_a(thing, FunctionType):
        yield from _of_function(thing, home)
    elif is_a(thing, (staticmethod, classmethod, MethodType)):
        yield thing.__func__
        yield getattr(thing, "__self__", None)
    elif is_a(thing, property):
        yield from (thing.fget, thing.fset, thing.fdel)
    elif is_a(thing, (partial, partialmethod)):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif is_a(thing, (list, tuple, set, frozenset)):
        yield from thing
    elif is_a(thing, dict):
        yield from thing.values()
    else:
        yield from _attributes(thing)


def _of_function(function: FunctionType, home: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty cell
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    if function.__globals__ is not home:
        return  # globals of other modules would lead to everything that is loaded
    names, everything = _names(function.__code__), function.__globals__
    for name in names & everything.keys():
        yield everything[name]
        if is_a(everything[name], (type, ModuleType)):
            # The code may call an attribute of this class or module.
            held: Mapping[str, Any] = vars(everything[name])
            yield from (held[attribute] for attribute in names & held.keys())


def _names(code: CodeType) -> set[str]:
    """Return the names that code uses, including its nested functions."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _attributes(thing: Any) -> Iterator[Any]:
    try:
        yield getattr(thing, "__wrapped__", None)
        names = vars(thing) if not is_a(thing, type) else {}
    except Exception:  # a proxy or an object without a dictionary
        return
    yield from list(names.values())
