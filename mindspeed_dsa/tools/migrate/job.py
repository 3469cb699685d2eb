"""A job's flags as they are taken apart: what was given, what becomes of each, and the new command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from packaging.version import Version

Verdict = Literal["same", "megatron", "not needed", "not served"]


@dataclass(frozen=True)
class Row:
    """One flag.

    Attributes:
        flag: MindSpeed's name.
        verdict: ``same``: a flag of this library with that name serves it; ``megatron``: a flag of Megatron
            does, or one of this library with another name; ``not needed``; ``not served``.
        why: one sentence; of a value, where the values say more.
        name: what the flag is called now, where that differs.
        values: values that are written otherwise now.
        inert: values with which the flag does nothing, whatever the verdict says.
        refused: values that are not served although the flag is, and why.
        results: of a flag that is not served: whether training without it computes something else.
        switch: flag without which MindSpeed ignores this one.
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
        """The flag's present name, where it has one."""
        return (self.name or self.flag) if self.verdict in ("same", "megatron") else ""


def _each(flags: str) -> Iterator[str]:
    return (f"--{name}" for name in flags.split())


def same(flags: str, why: str = "", *, switch: str = "") -> list[Row]:
    """Rows of flags that this library has; names are given without dashes in front."""
    return [Row(flag, "same", why, switch=switch) for flag in _each(flags)]


def renamed(names: Mapping[str, str], why: str = "", *, switch: str = "") -> list[Row]:
    """Rows of flags by their present names."""
    return [Row(f"--{old}", "megatron", why, f"--{new}", switch=switch) for old, new in names.items()]


def kept(flags: str, why: str = "Megatron's own flag.") -> list[Row]:
    """Rows of flags that Megatron has taken over by name."""
    return [Row(flag, "megatron", why) for flag in _each(flags)]


def not_needed(flags: str, why: str) -> list[Row]:
    """Rows of flags whose work is done without them."""
    return [Row(flag, "not needed", why) for flag in _each(flags)]


def slower(flags: str, why: str, inert: tuple[str, ...] = ()) -> list[Row]:
    """Rows of flags without which a job computes the same, at another speed or with other memory."""
    return [Row(flag, "not served", why, inert=inert) for flag in _each(flags)]


def different(flags: str, why: str, inert: tuple[str, ...] = ()) -> list[Row]:
    """Rows of flags without which a job computes something else."""
    return [Row(flag, "not served", why, inert=inert, results=True) for flag in _each(flags)]


def by_flag(*tables: Iterable[Row]) -> dict[str, Row]:
    """Rows of several tables; where two have a flag, the later one counts."""
    return {row.flag: row for table in tables for row in table}


Kind = Literal["same", "megatron", "not needed", "not served", "unchanged", "unknown"]
"""Verdicts of MindSpeed's flags; ``unchanged`` is a flag of Megatron's or of this library."""


LATENT = {"--multi-latent-attention", "--multi-head-latent-attention"}
"""Flags of which a command line with latent attention has at least one."""
FLAG = re.compile(r"--?[A-Za-z]")
"""How a word begins that is a flag."""


class Source(str):
    """A word in a shell's own notation, quotes included: it is written as it is."""


@dataclass(frozen=True)
class Given:
    """One flag with its values.

    Attributes:
        flag: with the dashes.
        values: as the program would read them.
        written: as the script has them: :class:`Source`, where variables may stand for values.
    """

    flag: str
    values: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    @property
    def value(self) -> str:
        """The value of a flag that takes one; empty without one."""
        return " ".join(self.values)

    def __str__(self) -> str:
        return " ".join((self.flag, *self.values))


def made(name: str, *values: str) -> Given:
    """Return a flag that no command line has written."""
    return Given(name, values, values)


@dataclass(frozen=True)
class Outcome:
    """Outcome of one flag.

    Attributes:
        given: the flag.
        kind: how it is served.
        now: flags that stand in its place, as they are written now; empty if none does.
        why: a sentence, where there is something to say.
        results: of a flag that is not served: whether the job computes something else without it.
    """

    given: Given
    kind: Kind
    now: str = ""
    why: str = ""
    results: bool = False


def split(words: Sequence[str], written: Sequence[str] | None = None) -> tuple[list[str], list[Given]]:
    """Words before the first flag, and the flags.

    A word that begins with two dashes begins a flag, and so does one dash before a letter; ``--flag=value``
    is a flag with one value.

    Args:
        words: of a command line, as the program would read them.
        written: the same flags as the script has them.
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
    """Return whether two flags have the same values, numbers by their value."""
    return len(one) == len(other) and all(
        a == b or _number(a) == _number(b) for a, b in zip(one, other, strict=True)
    )


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


class Job:
    """The flags of one command line while rules and tables take their turns.

    Attributes:
        release: of Megatron-core, that the new flags are for; ``None``: the newest one known.
        outcomes: by flag, in the order in which flags were given.
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
        """The value of a flag, or what it has without being given."""
        return self.given[flag].value if flag in self.given else default

    def number(self, flag: str, default: int | None = None) -> int | None:
        """The value of a flag as an integer; ``None`` where it is no number, such as an unknown variable."""
        if flag not in self.given:
            return default
        text = self.text(flag)
        return int(text) if re.fullmatch(r"\d+", text) else None

    def unknown(self, flag: str) -> bool:
        """Return whether only a shell knows the value."""
        return bool(set(self.text(flag)) & set("$`"))

    def open(self) -> Iterator[Given]:
        """Flags that have no outcome yet."""
        return (given for given in list(self.given.values()) if given.flag not in self.outcomes)

    def before(self, release: str) -> bool:
        """Return whether the job runs on an older Megatron-core than that."""
        return self.release is not None and self.release < Version(release)

    # -- outcomes ------------------------------------------------------------------------------

    def is_kept(self, flag: str, kind: Verdict | Literal["unchanged", "unknown"], why: str = "") -> None:
        """The flag stays as it is."""
        given = self.given[flag]
        self.outcomes[flag] = Outcome(given, kind, str(given), why)

    def is_dropped(self, flag: str, why: str, *, results: bool | None = None) -> None:
        """The flag goes: not needed, or, where ``results`` says so or not, not served."""
        kind: Kind = "not needed" if results is None else "not served"
        self.outcomes[flag] = Outcome(self.given[flag], kind, "", why, bool(results))
        if not results:  # one that changes results stays, and no parser takes it
            self._out.pop(flag, None)

    def becomes(self, flag: str, now: Sequence[Given], why: str = "") -> None:
        """The flag is replaced by others; what the job gives of them already must agree."""
        given = self.given[flag]
        self.outcomes[flag] = Outcome(given, "megatron", " ".join(map(str, now)), why)
        for new in now:
            self._place(given, new)
        if flag not in {new.flag for new in now}:
            self._out.pop(flag, None)

    def overrides(self, flag: str, new: Given, why: str = "") -> None:
        """The flag changes the value of one of Megatron's, which MindSpeed reads otherwise."""
        given = self.given[flag]
        known = self.outcomes.get(flag)
        now = f"{known.now} {new}" if known and known.now else str(new)
        self.outcomes[flag] = Outcome(given, "megatron", now, why or (known.why if known else ""))
        if new.flag in self.given and new.flag != flag:
            self.outcomes[new.flag] = Outcome(
                self.given[new.flag], "unchanged", str(new), f"{flag} changes it."
            )
        self._made_by[new.flag] = given
        self._out[new.flag] = new
        if self._out.get(flag) is given:
            del self._out[flag]

    def omits(self, flag: str, why: str) -> None:
        """A flag of Megatron's is not written, because another one says it."""
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
        """Return new flags with the given flag in whose place each of them stands."""
        return {name: by.flag for name, by in self._made_by.items()}

    def command(self) -> list[Given]:
        """The flags of the new command line: where those that they replace stood, added ones last.

        Of a flag that was given more than once and stays, every occurrence stays: a job's own parser may
        collect them.
        """
        order = {flag: number for number, flag in enumerate(self.given)}
        places = {name: order[flag] for name, flag in self.places().items()}
        stay = [given for given in self._earlier if self._out.get(given.flag) is self.given[given.flag]]
        return sorted(
            [*stay, *self._out.values()],
            key=lambda new: order.get(new.flag, places.get(new.flag, len(order))),
        )
