"""Sessions of one process look for names in all modules again and again: third parties' are looked up.

A session goes through the names of thousands of modules when it begins, when it is verified and when it
ends, which is much of what a short case costs. All but a few hundred of the modules were there before
Megatron was, and nobody changes them but sessions. An index tells which of them hold an object; these are
gone through from then on, as are modules that have got more names since, and all others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mindspeed_dsa.patches import hooks

Space = dict[str, Any]
_OURS = ("mindspeed_dsa", "tests", "benchmarks", "__main__")


class Index:
    """Modules of third parties by what they hold, as it was when the index was made.

    Attributes:
        sizes: number of names of each module, by ``id`` of its dictionary.
        holding: dictionaries by ``id`` of what they hold.
        patched: dictionaries in which something was found that was looked for.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.holding: dict[int, list[int]] = {}
        self.patched: set[int] = set()
        for name, module in sys.modules.copy().items():
            space = hooks.namespace(module)
            if space is not None and name.partition(".")[0] not in _OURS:
                self.sizes[id(space)] = len(space)
                for value in space.values():
                    self.holding.setdefault(id(value), []).append(id(space))

    def note(self, wanted: Iterable[int]) -> None:
        """Have modules that hold one of these objects gone through, now and later."""
        for thing in wanted:
            self.patched.update(self.holding.get(thing, ()))

    def is_searched(self, space: Space) -> bool:
        """Whether to go through a module."""
        place = id(space)
        return self.sizes.get(place) != len(space) or place in self.patched


def look_up_third_parties() -> None:
    """Make the index; to be called once all of third parties is imported, and Megatron is not."""
    index = Index()
    every, by_identity = hooks.namespaces, hooks.bound_names

    def namespaces(since: str | None = None) -> Iterator[Space]:
        return filter(index.is_searched, every(since))

    def bound_names(wanted: Mapping[int, Any], since: str | None = None) -> Iterator[tuple[Space, str, Any]]:
        index.note(wanted)
        return by_identity(wanted, since)

    hooks.namespaces, hooks.bound_names = namespaces, bound_names
