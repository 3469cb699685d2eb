"""Objects that still hold an original after it was patched, where no assignment can reach: default
arguments, closures, containers, bound methods, class attributes, instances.

Does not find what the garbage collector does not track: local variables of running functions (they disappear
by themselves), objects that only C code holds, and everything that existed before a ``gc.freeze()``.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.patches import holders
from mindspeed_dsa.patches.holders import Path

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
    modules = holders.module_names()
    bookkeeping = [suspects, ours, *ours]
    found: dict[tuple[int, str], StaleReference] = {}
    paths = [Path((original,)) for original in suspects]
    for _ in range(_DEPTH):
        paths = _one_level(paths[:_WIDTH], modules, bookkeeping, found)
        if not paths:
            break
    for path in paths:
        name = f"{holders.described(path)}, deep inside other containers"
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
                result = holders.step(path, holder, modules)
                if isinstance(result, str):
                    found.setdefault((id(path.original), result), StaleReference(path.original, result))
                elif result is not None:
                    longer.setdefault((id(path.original), id(holder)), result)
    return list(longer.values())
