"""A row of the tables: one flag of MindSpeed or MindSpeed-LLM, and what has taken its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

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
