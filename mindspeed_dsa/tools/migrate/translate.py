"""A command line of MindSpeed's as one of Megatron's and this library's, with what became of each flag."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mindspeed_dsa import features
from mindspeed_dsa.features.dsa.backport.feature import FLAGS as DSA_FLAGS
from mindspeed_dsa.patches import versions
from mindspeed_dsa.settings import GENERAL_FLAGS, did_you_mean
from mindspeed_dsa.tools.migrate import megatron_flags, rules
from mindspeed_dsa.tools.migrate.core_flags import CORE
from mindspeed_dsa.tools.migrate.job import Given, Job, Kind, Outcome, Row, Source, by_flag
from mindspeed_dsa.tools.migrate.llm_flags import LLM

KINDS: dict[Kind, str] = {
    "same": "the same here",
    "megatron": "Megatron's name now",
    "unchanged": "unchanged",
    "not needed": "not needed",
    "not served": "not served",
    "unknown": "unknown",
}
"""What becomes of a flag, in the words of the report."""
_SUPPLIED = {name for name, _ in DSA_FLAGS}
"""Megatron's flags that this library adds to the parsers of releases without DSA."""


@dataclass(frozen=True)
class Translation:
    """One command line.

    Attributes:
        outcomes: of each flag, in the order in which they were given.
        problems: contradictions, and flags that the release lacks, each a sentence.
        flags: of the new command line. Flags that change results and are not served stand there unchanged: no
            parser takes them.
        places: given flags in whose place new ones stand, by the new one's name.
    """

    outcomes: tuple[Outcome, ...]
    problems: tuple[str, ...]
    flags: tuple[Given, ...]
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def refused(self) -> tuple[Outcome, ...]:
        """Flags without which the job computes something else."""
        return tuple(outcome for outcome in self.outcomes if outcome.results)

    def of(self, kind: Kind) -> tuple[Outcome, ...]:
        """Outcomes of one kind."""
        return tuple(outcome for outcome in self.outcomes if outcome.kind == kind)

    def counts(self) -> dict[str, int]:
        """How many flags were given, and how many of them became what."""
        return {
            "flags": len(self.outcomes),
            **{kind: len(self.of(kind)) for kind in KINDS},
            "change results": len(self.refused),
        }

    def record(self) -> dict[str, Any]:
        """Plain data for other programs."""
        return {
            "counts": self.counts(),
            "flags": [
                {
                    "flag": each.given.flag,
                    "values": list(each.given.values),
                    "verdict": each.kind,
                    "now": each.now,
                    "why": each.why,
                    "changes_results": each.results,
                }
                for each in self.outcomes
            ],
            "problems": list(self.problems),
            "command": words(self.flags),
        }


@cache
def table() -> dict[str, Row]:
    """Every flag of MindSpeed core and MindSpeed-LLM that has a verdict."""
    return by_flag(CORE, LLM)


def own_flags() -> set[str]:
    """This library's own."""
    flags = [*GENERAL_FLAGS, *(flag for flag in features.all_flags() if not flag.megatron)]
    names = {name for flag in flags for name in (flag.name, *flag.aliases)}
    return names | {"--no-" + flag.name[2:] for flag in flags if flag.kind == "auto"}


def translate(flags: Sequence[Given], release: Version | None = None) -> Translation:
    """Find what becomes of each flag.

    Args:
        flags: as :func:`mindspeed_dsa.tools.migrate.job.split` finds them.
        release: of Megatron-core, for which the new flags are; ``None``: the newest one known.
    """
    job = Job(flags, release)
    rules.apply(job)
    ours = own_flags()
    for given in job.open():
        row = table().get(given.flag)
        if row is not None:
            _answer(job, given, row)
        elif given.flag in ours or megatron_flags.known(given.flag):
            job.is_kept(given.flag, "unchanged")
        else:
            near = did_you_mean(given.flag, {*table(), *ours, *megatron_flags.record()}, 0.85)
            job.is_kept(
                given.flag, "unknown", f"Neither MindSpeed's nor Megatron's; it stays as it is{near or '.'}"
            )
    command = job.command()
    problems = [*job.problems, *_missing(command, release, ours)]
    ordered = tuple(job.outcomes[flag] for flag in job.given)
    return Translation(ordered, tuple(problems), tuple(command), job.places())


def words(flags: Sequence[Given], written: bool = False) -> list[str]:
    """The flags as words of a command line; a value that looks like a flag is joined to its own."""
    made: list[str] = []
    for given in flags:
        values = given.written if written else given.values
        alone = given.values[0] if len(given.values) == len(values) == 1 else "a value"
        joined = alone.startswith("-") or not alone
        made += [type(values[0])(f"{given.flag}={values[0]}")] if joined else [given.flag, *values]
    return made


def quoted(word: str) -> str:
    """A word as a shell reads it back; variables in it stay variables."""
    if isinstance(word, Source):
        return word
    return f'"{word}"' if "$" in word and not set(word) & set('"`\\') else shlex.quote(word)


def _answer(job: Job, given: Given, row: Row) -> None:
    """Return what a row of the tables says of a flag."""
    if row.switch and row.switch not in job:
        job.is_dropped(given.flag, f"MindSpeed does not read it without {row.switch}.")
    elif given.value in row.refused:
        job.is_dropped(given.flag, row.refused[given.value], results=True)
    elif row.verdict == "same":
        unserved = _unserved(given.flag, job.release) or _unserved(row.switch, job.release)
        if unserved:
            job.is_dropped(given.flag, f"It needs megatron-core {unserved}.", results=False)
        else:
            job.is_kept(given.flag, "same", row.why)
    elif row.verdict == "megatron":
        value = row.values.get(given.value)
        values, written = ((value,), (value,)) if value is not None else (given.values, given.written)
        if row.now == given.flag and value is None:
            job.is_kept(given.flag, "megatron", row.why)
        else:
            job.becomes(given.flag, [Given(row.now, values, written)], row.why)
    elif row.verdict == "not needed":
        job.is_dropped(given.flag, row.why)
    elif given.values and given.value in row.inert:
        job.is_dropped(given.flag, f"With {given.value} it does nothing.")
    else:
        job.is_dropped(given.flag, row.why, results=row.results)


def _unserved(flag: str, release: Version | None) -> str:
    """The releases of Megatron-core that a feature with this flag serves, if this is none of them."""
    ranges = {
        feature.requires.versions.get(versions.MEGATRON_DISTRIBUTION, "")
        for feature in features.all_features()
        if any(known.name == flag and not known.megatron for known in feature.flags)
    }
    if release is None or any(SpecifierSet(each).contains(release, prereleases=True) for each in ranges):
        return ""
    return " or ".join(sorted(ranges))


def _missing(command: Sequence[Given], release: Version | None, ours: set[str]) -> list[str]:
    """Flags of Megatron's on the new command line that this release does not have."""
    name = f"Megatron-core {release}" if release else "the newest Megatron-core"
    return [
        f"{new.flag} is a flag of Megatron-core {having}, and {name} does not have it"
        for new in command
        if new.flag not in ours | _SUPPLIED and (having := megatron_flags.lacks(new.flag, release))
    ]
