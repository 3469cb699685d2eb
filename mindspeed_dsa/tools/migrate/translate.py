"""Translation of MindSpeed's command lines to flags of Megatron and this library, flag by flag."""

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
"""Dict from kind of outcome to its name in the report."""
_SUPPLIED = {name for name, _ in DSA_FLAGS}
"""Megatron's flags that this library adds for releases without DSA."""


@dataclass(frozen=True)
class Translation:
    """A translated command line.

    Attributes:
        outcomes: outcome of each flag, in the original order.
        problems: sentences about contradictions and about flags that the release lacks.
        flags: flags of the new command line. Flags that change results but have no equivalent are kept, so
            that Megatron's parser rejects the command line.
        places: dict from new flag to the original flag whose position it takes.
    """

    outcomes: tuple[Outcome, ...]
    problems: tuple[str, ...]
    flags: tuple[Given, ...]
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def refused(self) -> tuple[Outcome, ...]:
        """Outcomes of flags that change results and have no equivalent."""
        return tuple(outcome for outcome in self.outcomes if outcome.results)

    def of(self, kind: Kind) -> tuple[Outcome, ...]:
        """Return the outcomes with verdict ``kind``."""
        return tuple(outcome for outcome in self.outcomes if outcome.kind == kind)

    def counts(self) -> dict[str, int]:
        """Return the number of flags, in total and by kind."""
        return {
            "flags": len(self.outcomes),
            **{kind: len(self.of(kind)) for kind in KINDS},
            "change results": len(self.refused),
        }

    def record(self) -> dict[str, Any]:
        """Return the translation for JSON."""
        return {
            "counts": self.counts(),
            "flags": [
                {
                    "flag": outcome.given.flag,
                    "values": list(outcome.given.values),
                    "verdict": outcome.kind,
                    "now": outcome.now,
                    "why": outcome.why,
                    "changes_results": outcome.results,
                }
                for outcome in self.outcomes
            ],
            "problems": list(self.problems),
            "command": words(self.flags),
        }


@cache
def table() -> dict[str, Row]:
    """Return the verdicts on all flags of MindSpeed core and MindSpeed-LLM, by flag."""
    return by_flag(CORE, LLM)


def own_flags() -> set[str]:
    """Return all spellings of this library's own flags."""
    flags = [*GENERAL_FLAGS, *(flag for flag in features.all_flags() if not flag.megatron)]
    names = {name for flag in flags for name in (flag.name, *flag.aliases)}
    return names | {"--no-" + flag.name[2:] for flag in flags if flag.kind == "auto"}


def translate(flags: Sequence[Given], release: Version | None = None) -> Translation:
    """Translate a MindSpeed command line's flags to flags of Megatron and this library.

    Args:
        flags: flags as returned by :func:`mindspeed_dsa.tools.migrate.job.split`.
        release: Megatron-core release of the new flags; None for the newest known one.
    """
    job = Job(flags, release)
    # Rules first: they look at several flags at once. The tables then answer for the rest, flag by flag.
    rules.apply(job)
    ours = own_flags()
    for old in job.open():
        row = table().get(old.flag)
        if row is not None:
            _answer(job, old, row)
        elif old.flag in ours or old.flag in megatron_flags.record():
            job.is_kept(old.flag, "unchanged")
        else:
            near = did_you_mean(old.flag, {*table(), *ours, *megatron_flags.record()}, 0.85)
            job.is_kept(
                old.flag, "unknown", f"Neither MindSpeed's nor Megatron's; it stays as it is{near or '.'}"
            )
    command = job.command()
    # A rule may write flags that only exist in other releases.
    problems = [*job.problems, *_missing(command, release, ours)]
    ordered = tuple(job.outcomes[flag] for flag in job.given)
    return Translation(ordered, tuple(problems), tuple(command), job.places())


def words(flags: Sequence[Given], written: bool = False) -> list[str]:
    """Return flags as words; a single value that begins with a dash is joined as ``--flag=-1``."""
    made: list[str] = []
    for flag in flags:
        values = flag.written if written else flag.values
        alone = flag.values[0] if len(flag.values) == len(values) == 1 else "a value"
        # argparse takes a separate value such as -1 for an option.
        joined = alone.startswith("-") or not alone
        made += [type(values[0])(f"{flag.flag}={values[0]}")] if joined else [flag.flag, *values]
    return made


def quoted(word: str) -> str:
    """Quote a word for a shell, but leave its variables to be expanded."""
    if isinstance(word, Source):
        return word
    return f'"{word}"' if "$" in word and not set(word) & set('"`\\') else shlex.quote(word)


def _answer(job: Job, given: Given, row: Row) -> None:
    """Add the outcome of a flag to ``job``, according to the verdict in its table row."""
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
    """Return the releases that the features with this flag support; empty if ``release`` is one of them."""
    ranges = {
        feature.requires.versions.get(versions.MEGATRON_DISTRIBUTION, "")
        for feature in features.all_features()
        if any(known.name == flag and not known.megatron for known in feature.flags)
    }
    if release is None or any(SpecifierSet(each).contains(release, prereleases=True) for each in ranges):
        return ""
    return " or ".join(sorted(ranges))


def _missing(command: Sequence[Given], release: Version | None, ours: set[str]) -> list[str]:
    """Return problems for flags on the new command line that this Megatron release lacks."""
    name = f"Megatron-core {release}" if release else "the newest Megatron-core"
    return [
        f"{new.flag} is a flag of Megatron-core {having}, and {name} does not have it"
        for new in command
        if new.flag not in ours | _SUPPLIED and (having := megatron_flags.lacks(new.flag, release))
    ]
