"""One more flag: what it changes in a plan, and which flags would make a plan fit."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.session.start_report import aligned
from mindspeed_dsa.tools.planner import communication, flags
from mindspeed_dsa.tools.planner.command_lines import FULL, shown
from mindspeed_dsa.tools.planner.memory import GIB
from mindspeed_dsa.tools.planner.plan import FITS, TIGHT, TOO_LARGE, Plan
from mindspeed_dsa.tools.planner.report import memory_rows


@dataclass(frozen=True)
class Difference:
    """Difference of two plans, with minus without.

    Attributes:
        flag: flag, as given.
        memory: bytes on the rank that needs most, by row.
        host: bytes there on the host.
        received: bytes of the rank that receives most, by group.
        seconds: seconds of a step, by part.
    """

    flag: str
    memory: Mapping[str, float]
    host: float
    received: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def memory_sum(self) -> float:
        """Bytes."""
        return sum(self.memory.values())

    @property
    def seconds_sum(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())

    def text(self) -> str:
        """For a terminal."""
        rows = [(f"with {self.flag}", "", "")]
        for name, value in (*self.memory.items(), ("memory", self.memory_sum), ("on the host", self.host)):
            if abs(value) > 5e-4 * GIB or name == "memory":
                rows.append((name, f"{value / GIB:+.2f}", "GiB"))
        for name, value in self.received.items():
            rows += [(f"{name} received", f"{value / 1e9:+.3f}", "GB")] if abs(value) > 1e5 else []
        for name, value in (*self.seconds.items(), ("step", self.seconds_sum)):
            if abs(value) > 5e-5 or name == "step":
                rows.append((name, f"{1e3 * value:+.1f}", "ms"))
        return "\n".join(aligned(rows))


def words_of(flag: str) -> list[str]:
    """``--flag``, ``--flag value`` or several, as one argument holds them.

    Raises:
        SettingsError: no plan depends on it.
    """
    words = shlex.split(flag)
    known = flags.planned()
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    if unknown or not words or not words[0].startswith("--"):
        raise SettingsError(
            f"mindspeed_dsa plan: --what-if {flag!r} is no flag that a plan depends on; quote flag and value "
            "together, as in --what-if='--tensor-model-parallel-size 8'"
        )
    return words


def differences(chosen: list[str], before: Plan, planned: Callable[[list[str]], Plan]) -> list[Difference]:
    """One for each flag.

    Args:
        chosen: flags, as given.
        before: without any of them.
        planned: makes a plan with more words on the job's command line.
    """
    return [difference(flag, before, planned(words_of(flag))) for flag in chosen]


def difference(flag: str, before: Plan, after: Plan) -> Difference:
    """With minus without."""

    def subtract(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {name: a.get(name, 0.0) - b.get(name, 0.0) for name in {**b, **a}}

    def memory(plan: Plan) -> dict[str, float]:
        return {name: values[plan.worst.rank] for name, values in memory_rows(plan).items()}

    def received(plan: Plan) -> dict[str, float]:
        busiest = max(plan.transfers, key=lambda own: sum(each.nbytes for each in own))
        return communication.by_group(busiest)

    return Difference(
        flag,
        subtract(memory(after), memory(before)),
        after.worst.host - before.worst.host,
        subtract(received(after), received(before)),
        subtract(after.time.parts, before.time.parts),
    )


MEMORY_FLAGS = (
    "--use-fused-dsa",
    "--use-distributed-optimizer",
    "--moe-permute-fusion",
    "--recompute-norm --recompute-activation-function",
    "--reuse-fp32-param",
    "--swap-optimizer",
    "--swap-attention auto",
    "--swap-attention",
    FULL,
)
"""Flags that save memory."""
_SWAPPED = {"--swap-attention auto", "--swap-attention"}
_EXCLUDED = {
    # What is recomputed in full leaves the others nothing to do, and training refuses both.
    FULL: {"--recompute-norm --recompute-activation-function", *_SWAPPED},
    "--recompute-norm --recompute-activation-function": {FULL},
    **{flag: {FULL, *_SWAPPED} for flag in _SWAPPED},
}
_VERDICTS = (FITS, TIGHT, TOO_LARGE)


@dataclass(frozen=True)
class Way:
    """Flags that save memory in a plan.

    Attributes:
        flags: beside those of the plan.
        memory: bytes that they change on the rank that needs most.
        seconds: seconds of a step, likewise.
        verdict: verdict on the plan with them.
    """

    flags: str
    memory: float
    seconds: float
    verdict: str


def ways(before: Plan, planned: Callable[[list[str]], Plan]) -> list[Way]:
    """Return what each of :data:`MEMORY_FLAGS` saves, and last several of them that fit together.

    Args:
        before: plan that does not fit.
        planned: makes a plan with more words on the job's command line.
    """

    def way(chosen: Sequence[str]) -> Way | None:
        words = " ".join(chosen)
        try:
            after = planned(shlex.split(words))
        except SettingsError:  # they exclude each other, or the job has what excludes them
            return None
        saved = after.worst.total - before.worst.total
        return Way(words, saved, after.time.total - before.time.total, after.verdict)

    single = [each for flag in MEMORY_FLAGS if (each := way([flag])) and each.memory < -0.05 * GIB]
    chosen: list[str] = []
    best: Way | None = None
    for flag in sorted(single, key=lambda each: each.seconds):
        if best and best.verdict == FITS:
            break
        free = [each for each in chosen if each not in _EXCLUDED.get(flag.flags, ())]
        without = ([each for each in free if each != other] for other in free)
        for kept in (free, *without):
            tried = way([*kept, flag.flags])
            if tried and (best is None or tried.memory < best.memory):
                chosen, best = [*kept, flag.flags], tried
                break
    for spare in reversed(chosen[:-1]):
        fewer = [other for other in chosen if other != spare]
        tried = way(fewer)
        if best and tried and tried.verdict == best.verdict == FITS and tried.seconds <= best.seconds:
            chosen, best = fewer, tried
    reached = min((_VERDICTS.index(each.verdict) for each in single), default=len(_VERDICTS))
    if best is None or len(chosen) < 2 or _VERDICTS.index(best.verdict) > reached:
        return single
    quicker = [each for each in single if each.verdict == best.verdict and each.seconds <= best.seconds]
    return single if quicker else [*single, best]


def text_of_ways(found: list[Way], devices: int) -> str:
    """For a terminal, with what is left to do where no flags are enough.

    Args:
        found: result of :func:`ways`.
        devices: number of devices of the job.
    """
    rows = [("what saves memory", "GiB", "step [s]", "then")]
    together = [each for each in found if each.flags not in MEMORY_FLAGS]
    for each in found:
        name = "together, as below" if each in together else each.flags
        rows.append((name, f"{each.memory / GIB:+.1f}", f"{each.seconds:+.2f}", each.verdict))
    lines = aligned(rows) if found else []
    lines += [line for each in together for line in shown(shlex.split(each.flags))]
    if not any(each.verdict == FITS for each in found):
        lines.append(f"No flags make this layout fit; plan --search looks for others of {devices} devices.")
    return "\n".join(lines)
