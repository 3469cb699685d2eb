"""Who still holds an original after it was patched, where no assignment can reach: default
arguments, closures, containers, bound methods, class attributes."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

_DEPTH = 3  # original <- container <- container <- something with a name


@dataclass(frozen=True)
class StaleReference:
    """One holder of one original."""

    original: Any
    holder: str


def find(originals: Iterable[Any], own: Sequence[Any]) -> list[StaleReference]:
    """Search the garbage collector's heap, once per level, for holders of the ``originals``.

    Args:
        originals: functions or classes that were replaced.
        own: objects of the engine itself that hold originals on purpose.
    """
    wanted = list({id(original): original for original in originals}.values())
    if not wanted:
        return []
    ignored = {id(thing) for thing in own} | {id(own), id(wanted)}
    parents = _parents(wanted, ignored)
    ignored.add(id(parents))
    found = []
    for original in wanted:
        for holder in parents.get(id(original), ()):
            description = _describe(holder, original, parents, _DEPTH)
            if description is not None:
                found.append(StaleReference(original, description))
    return found


def closure_cells(function: Any) -> Iterator[Any]:
    """The cells through which a composed function reaches what it wraps, at every depth."""
    for cell in getattr(function, "__closure__", None) or ():
        yield cell
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if isinstance(content, FunctionType):
            yield from closure_cells(content)


def _parents(wanted: list[Any], ignored: set[int]) -> dict[int, list[Any]]:
    """Referrers by ``id`` of what they refer to, level by level up to something with a name."""
    parents: dict[int, list[Any]] = {}
    frontier: list[Any] = wanted
    for _ in range(_DEPTH):
        if not frontier:
            break
        known = {id(thing) for thing in frontier}
        referrers = gc.get_referrers(*frontier)
        skip = ignored | {id(frontier), id(referrers), id(parents)} | {id(held) for held in parents.values()}
        following: list[Any] = []
        for referrer in referrers:
            if id(referrer) in skip or isinstance(referrer, FrameType):
                continue
            for child in {id(child): child for child in gc.get_referents(referrer)}.values():
                if id(child) in known:
                    parents.setdefault(id(child), []).append(referrer)
            if not isinstance(referrer, (ModuleType, type, FunctionType)):
                following.append(referrer)
        ignored |= {id(frontier), id(referrers)}
        frontier = following
    return parents


def _describe(holder: Any, child: Any, parents: dict[int, list[Any]], depth: int) -> str | None:
    """A name for ``holder`` that a reader can search for; ``None`` if it is nobody's any more."""
    if isinstance(holder, ModuleType):
        return holder.__name__
    if isinstance(holder, (type, FunctionType)):
        return _attribute(holder, child)
    if isinstance(holder, MethodType):
        return f"a bound method of a {type(holder.__self__).__qualname__}"
    above = _first_description(holder, parents, depth)
    if isinstance(holder, CellType):
        return f"the closure of {above}" if above else None
    if isinstance(holder, dict):
        key = next((key for key, value in tuple(holder.items()) if value is child), None)
        return f"{above or 'a dictionary'}[{key!r}]"
    if isinstance(holder, partial):
        return f"a functools.partial in {above}" if above else "a functools.partial"
    if isinstance(holder, (tuple, list, set, frozenset)):
        return above or f"a {type(holder).__name__}"
    if isinstance(holder, (staticmethod, classmethod, property)):
        return above or f"a {type(holder).__name__}"
    return f"a {type(holder).__module__}.{type(holder).__qualname__}"


def _first_description(holder: Any, parents: dict[int, list[Any]], depth: int) -> str | None:
    if depth == 0:
        return None
    for parent in parents.get(id(holder), ()):
        description = _describe(parent, holder, parents, depth - 1)
        if description is not None:
            return description
    return None


def _attribute(holder: Any, child: Any) -> str:
    name = f"{holder.__module__}.{holder.__qualname__}"
    if isinstance(holder, FunctionType):
        if child is holder.__defaults__ or child is holder.__kwdefaults__:
            return f"a default argument of {name}"
        return name
    key = next((key for key, value in vars(holder).items() if value is child), None)
    return f"class attribute {name}.{key}" if key else f"class {name}"
