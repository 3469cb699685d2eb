"""Data classes of a translation: verdicts on flags, the flags of a command line, and their outcomes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from packaging.version import Version

Verdict = Literal["same", "megatron", "not needed", "not served"]


@dataclass(frozen=True)
class Row:
    """Verdict on one flag of MindSpeed.

    Attributes:
        flag: MindSpeed's name.
        verdict: ``same``: this library has the flag under the same name; ``megatron``: replaced by a flag of
            Megatron, or by a flag of this library with another name; ``not needed``; ``not served``: no
            equivalent.
        why: one sentence for the report.
        name: new name, if it differs.
        values: dict from old to new value, for values that are spelt differently.
        inert: values with which the flag has no effect, whatever the verdict.
        refused: dict from unsupported value to reason, for a flag that is otherwise supported.
        results: whether dropping a flag with verdict ``not served`` changes training results.
        switch: another flag; without it, MindSpeed ignores this one.
    """

    flag: str
    verdict: Verdict
    why: str = ""
    name: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    inert: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    results: bool = False
    switch: str = ""

    @property
    def now(self) -> str:
        """The flag's new name; empty if it is not needed or not served."""
        return (self.name or self.flag) if self.verdict in ("same", "megatron") else ""


def _each(flags: str) -> Iterator[str]:
    return (f"--{name}" for name in flags.split())


def same(flags: str, why: str = "", *, switch: str = "") -> list[Row]:
    """Return rows for flags that this library has under the same name.

    Args:
        flags: names without dashes, separated by blanks.
        why: sentence for the report.
        switch: flag without which MindSpeed ignores these.
    """
    return [Row(flag, "same", why, switch=switch) for flag in _each(flags)]


def renamed(names: Mapping[str, str], why: str = "", *, switch: str = "") -> list[Row]:
    """Return rows for renamed flags, from a dict from old to new name without dashes."""
    return [Row(f"--{old}", "megatron", why, f"--{new}", switch=switch) for old, new in names.items()]


def kept(flags: str, why: str = "Megatron's own flag.") -> list[Row]:
    """Return rows for flags that Megatron has under the same name."""
    return [Row(flag, "megatron", why) for flag in _each(flags)]


def not_needed(flags: str, why: str) -> list[Row]:
    """Return rows for flags with verdict ``not needed``."""
    return [Row(flag, "not needed", why) for flag in _each(flags)]


def slower(flags: str, why: str, inert: tuple[str, ...] = ()) -> list[Row]:
    """Return rows for flags with verdict ``not served`` that affect only speed or memory."""
    return [Row(flag, "not served", why, inert=inert) for flag in _each(flags)]


def different(flags: str, why: str, inert: tuple[str, ...] = ()) -> list[Row]:
    """Return rows for flags with verdict ``not served`` that affect results."""
    return [Row(flag, "not served", why, inert=inert, results=True) for flag in _each(flags)]


def by_flag(*tables: Iterable[Row]) -> dict[str, Row]:
    """Return a dict from flag to row; a later table overrides an earlier one."""
    return {row.flag: row for table in tables for row in table}


Kind = Literal["same", "megatron", "not needed", "not served", "unchanged", "unknown"]
"""Verdicts on flags; ``unchanged`` is for flags of Megatron or of this library."""


LATENT = {"--multi-latent-attention", "--multi-head-latent-attention"}
"""Flags that switch on latent attention; a command line may have either."""
FLAG = re.compile(r"--?[A-Za-z]")
"""Beginning of a word that is a flag."""


class Source(str):
    """Word in shell notation with its quotes, to be copied into the new script unchanged."""


@dataclass(frozen=True)
class Given:
    """One flag of a command line with its values.

    Attributes:
        flag: name with dashes.
        values: expanded values, as the program gets them.
        written: values as in the script: :class:`Source` words, which may contain variables.
    """

    flag: str
    values: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    @property
    def value(self) -> str:
        """The value of a flag with one value; empty without values."""
        return " ".join(self.values)

    def __str__(self) -> str:
        return " ".join((self.flag, *self.values))


def made(name: str, *values: str) -> Given:
    """Return a flag added by the translation."""
    return Given(name, values, values)


@dataclass(frozen=True)
class Outcome:
    """Result of the translation for one flag.

    Attributes:
        given: original flag.
        kind: verdict.
        now: text of the flags that replace the original one; empty if none does.
        why: one sentence, or empty.
        results: whether dropping the flag changes training results.
    """

    given: Given
    kind: Kind
    now: str = ""
    why: str = ""
    results: bool = False


def split(words: Sequence[str], written: Sequence[str] | None = None) -> tuple[list[str], list[Given]]:
    """Split words into those before the first flag, and the flags.

    A flag begins with two dashes, or with one dash and a letter; ``--flag=value`` is a flag with one value.

    Args:
        words: words of a command line as the program reads them.
        written: same words in the script's notation.
    """
    first, flags = _split(words)
    if written is not None:
        first, texts = _split(written)
        flags = [replace(given, written=text.values) for given, text in zip(flags, texts, strict=True)]
    return first, flags


def _split(words: Sequence[str]) -> tuple[list[str], list[Given]]:
    first: list[str] = []
    flags: list[Given] = []
    for word in words:
        if FLAG.match(word):
            name, equals, text = word.partition("=")
            value = type(word)(text)
            flags.append(Given(name, (value,), (value,)) if equals else Given(name))
        elif flags:
            values = (*flags[-1].values, word)
            flags[-1] = Given(flags[-1].flag, values, values)
        else:
            first.append(word)
    return first, flags


def equal(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether two lists of values are equal; numbers are compared by value."""
    return len(one) == len(other) and all(
        a == b or _number(a) == _number(b) for a, b in zip(one, other, strict=True)
    )


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


class Job:
    """State of a translation, to which rules and tables add outcomes.

    Attributes:
        release: Megatron-core release of the new command line; None for the newest known one.
        outcomes: dict from flag to outcome.
        problems: contradictions, each a sentence.
    """

    def __init__(self, flags: Sequence[Given], release: Version | None = None) -> None:
        self.release = release
        self.given = {given.flag: given for given in flags}  # the last one counts, as in argparse
        self._earlier = [given for given in flags if given is not self.given[given.flag]]
        self.outcomes: dict[str, Outcome] = {}
        self.problems: list[str] = []
        self._out = dict(self.given)
        self._made_by: dict[str, Given] = {}

    # -- questions -----------------------------------------------------------------------------

    def __contains__(self, flag: str) -> bool:
        return flag in self.given

    def text(self, flag: str, default: str = "") -> str:
        """Return the value of a flag, or the default if the flag is not given."""
        return self.given[flag].value if flag in self.given else default

    def number(self, flag: str, default: int | None = None) -> int | None:
        """Return the value of a flag as an integer; None if it is no number, such as an unset variable."""
        if flag not in self.given:
            return default
        text = self.text(flag)
        return int(text) if re.fullmatch(r"\d+", text) else None

    def unknown(self, flag: str) -> bool:
        """Return whether the value contains a variable or command that only a shell can evaluate."""
        return bool(set(self.text(flag)) & set("$`"))

    def open(self) -> Iterator[Given]:
        """Yield the flags for which neither rules nor tables have decided an outcome yet."""
        return (given for given in list(self.given.values()) if given.flag not in self.outcomes)

    def before(self, release: str) -> bool:
        """Return whether the job's Megatron-core is older than ``release``."""
        return self.release is not None and self.release < Version(release)

    # -- outcomes ------------------------------------------------------------------------------

    def is_kept(self, flag: str, kind: Verdict | Literal["unchanged", "unknown"], why: str = "") -> None:
        """Record that the flag stays unchanged."""
        given = self.given[flag]
        self.outcomes[flag] = Outcome(given, kind, str(given), why)

    def is_dropped(self, flag: str, why: str, *, results: bool | None = None) -> None:
        """Drop a flag: as ``not needed``, or as ``not served`` if ``results`` is given.

        Args:
            flag: flag to drop.
            why: sentence for the report.
            results: whether dropping the flag changes training results; None if it is not needed.
        """
        kind: Kind = "not needed" if results is None else "not served"
        self.outcomes[flag] = Outcome(self.given[flag], kind, "", why, bool(results))
        if not results:  # a flag that changes results stays in the command, which parsers then refuse
            self._out.pop(flag, None)

    def becomes(self, flag: str, now: Sequence[Given], why: str = "") -> None:
        """Replace a flag by the flags ``now``; record a problem if the job sets one of these differently."""
        old = self.given[flag]
        self.outcomes[flag] = Outcome(old, "megatron", " ".join(map(str, now)), why)
        for new in now:
            self._place(old, new)
        if flag not in {new.flag for new in now}:
            self._out.pop(flag, None)

    def overrides(self, flag: str, new: Given, why: str = "") -> None:
        """Replace a flag by ``new``. If the job also sets the new flag, that value is overridden."""
        old = self.given[flag]
        earlier = self.outcomes.get(flag)
        now = f"{earlier.now} {new}" if earlier and earlier.now else str(new)
        self.outcomes[flag] = Outcome(old, "megatron", now, why or (earlier.why if earlier else ""))
        if new.flag in self.given and new.flag != flag:
            self.outcomes[new.flag] = Outcome(
                self.given[new.flag], "unchanged", str(new), f"{flag} changes it."
            )
        self._made_by[new.flag] = old
        self._out[new.flag] = new
        if self._out.get(flag) is old:
            del self._out[flag]

    def omits(self, flag: str, why: str) -> None:
        """Remove a flag of Megatron that another flag makes redundant."""
        if self._out.pop(flag, None) is not None and flag in self.given:
            self.outcomes[flag] = Outcome(self.given[flag], "unchanged", "", why)

    def _place(self, given: Given, new: Given) -> None:
        standing = self._out.get(new.flag) if new.flag != given.flag else None
        if standing is not None and not equal(standing.values, new.values):
            by = self._made_by.get(new.flag)
            there = f"{by} asks for {standing}" if by else f"{standing} is given too"
            asks = f"{given} means {new}" if str(given) != str(new) else str(given)
            self.problems.append(f"{asks}, and {there}: keep one of them")
            return
        self._made_by[new.flag] = given
        if standing is None:
            self._out[new.flag] = new

    def places(self) -> dict[str, str]:
        """Return a dict from new flag to the original flag whose position it takes."""
        return {name: by.flag for name, by in self._made_by.items()}

    def command(self) -> list[Given]:
        """Return the new command line's flags, in the positions of the old ones; added ones are last.

        If a kept flag was given several times, all occurrences stay, because the job's own parser may collect
        them.
        """
        order = {flag: number for number, flag in enumerate(self.given)}
        places = {name: order[flag] for name, flag in self.places().items()}
        stay = [given for given in self._earlier if self._out.get(given.flag) is self.given[given.flag]]
        return sorted(
            [*stay, *self._out.values()],
            key=lambda new: order.get(new.flag, places.get(new.flag, len(order))),
        )
