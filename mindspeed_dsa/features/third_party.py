"""Features that other distributions ship, found through their entry points.

A plug-in that cannot be used is kept with its problem: the run goes on without it, and ``doctor`` and every
message about an unknown switch name it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from mindspeed_dsa.feature import Feature, Flag


@dataclass(frozen=True)
class Plugin:
    """One entry point of another distribution.

    Attributes:
        distribution: name and version.
        entry: name of the entry point.
        features: declared features; empty if loading failed.
        problem: reason why the plug-in cannot be used; empty if it can.
    """

    distribution: str
    entry: str
    features: tuple[Feature, ...] = ()
    problem: str = ""

    @property
    def flags(self) -> list[Flag]:
        """Flags of all features of the plug-in."""
        return [flag for feature in self.features for flag in feature.flags]

    @property
    def message(self) -> str:
        """Problem, with the name of the distribution."""
        return f"plug-in {self.distribution} (entry point {self.entry!r}) cannot be used: {self.problem}"


def read(group: str, known: Iterable[Feature], flags: Iterable[Flag]) -> tuple[Plugin, ...]:
    """Load every entry point of the group, sorted by distribution.

    Args:
        group: group of the entry points.
        known: features of mindspeed_dsa; their names and flags are reserved.
        flags: other reserved flags.
    """
    taken = _Taken(flags)
    for feature in known:
        taken.add(feature, "mindspeed_dsa")
    plugins = []
    for plugin in sorted(map(_load, entry_points(group=group)), key=lambda p: (p.distribution, p.entry)):
        problem = plugin.problem or next(taken.problems(plugin.features), "")
        if not problem:
            for feature in plugin.features:
                taken.add(feature, plugin.distribution)
        plugins.append(replace(plugin, problem=problem))
    return tuple(plugins)


class _Taken:
    """Reserved feature names and flag spellings, with their owners."""

    def __init__(self, flags: Iterable[Flag]) -> None:
        self._names: dict[str, str] = {}
        self._flags: dict[str, tuple[Flag, str]] = {}
        self._add_flags(flags, "mindspeed_dsa")

    def add(self, feature: Feature, owner: str) -> None:
        """Reserve a feature's name and flags."""
        self._names.setdefault(feature.name, owner)
        self._add_flags(feature.flags, owner)

    def _add_flags(self, flags: Iterable[Flag], owner: str) -> None:
        for flag in flags:
            for spelling in _spellings(flag):
                self._flags.setdefault(spelling, (flag, owner))

    def problems(self, features: Sequence[Feature]) -> Iterator[str]:
        """Yield the reasons why these features cannot be added."""
        names: set[str] = set()
        for feature in features:
            if feature.name in self._names or feature.name in names:
                owner = self._names.get(feature.name, "the plug-in itself")
                yield (
                    f"a feature named {feature.name!r} is declared by {owner} already; give this one another "
                    "name"
                )
            names.add(feature.name)
            for flag in feature.flags:
                if not flag.name.startswith("--"):
                    yield f"{feature.name}: the flag {flag.name!r} must start with --"
                for spelling in _spellings(flag):
                    other, owner = self._flags.get(spelling, (flag, ""))
                    if not flag.same_as(other):
                        yield (
                            f"{feature.name}: its flag {flag.name} means something else in {owner}, which "
                            f"declares {other.name}; rename it"
                        )
            for versions in (*feature.requires.versions.values(), *(p.versions for p in feature.patches)):
                try:
                    SpecifierSet(versions)
                except InvalidSpecifier:
                    yield f"{feature.name}: {versions!r} is no PEP 440 range, such as '>=0.16,<0.19'"


def _spellings(flag: Flag) -> Iterator[str]:
    """Yield all spellings of a flag: destination, command line names and negations."""
    yield flag.dest
    yield from (flag.name, *flag.aliases)
    if flag.kind == "auto":
        yield from (f"--no-{name.removeprefix('--')}" for name in (flag.name, *flag.aliases))


def _load(point: EntryPoint) -> Plugin:
    distribution = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
    try:
        features = tuple(
            replace(feature, distribution=distribution) for feature in _declared(point.load(), point.value)
        )
    except (Exception, SystemExit) as error:  # importing foreign code may raise anything
        return Plugin(distribution, point.name, problem=f"{point.value} raises {error!r}")
    return Plugin(distribution, point.name, features)


def _declared(found: Any, name: str) -> Iterator[Feature]:
    """Yield the features of an entry point.

    Raises:
        TypeError: the object is neither a feature, nor a module with ``FEATURE`` or ``FEATURES``, nor a
            sequence of these.
    """
    if isinstance(found, Feature):
        yield found
    elif isinstance(found, (list, tuple)):
        for each in found:
            yield from _declared(each, name)
    elif isinstance(found, ModuleType) and hasattr(found, "FEATURES"):
        yield from _declared(tuple(found.FEATURES), f"{name}.FEATURES")
    elif isinstance(found, ModuleType) and hasattr(found, "FEATURE"):
        yield from _declared(found.FEATURE, f"{name}.FEATURE")
    else:
        raise TypeError(
            f"{name} is {found!r}: an entry point names a Feature, a module with FEATURE or FEATURES, or a "
            "sequence of these"
        )
