"""Comparison of plans: the effect of one more flag, and flags that would make a plan fit."""

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
    """Difference between the plans with and without a flag.

    Attributes:
        flag: flag as given.
        memory: dict from row of the memory table to the change in bytes, on the rank with the largest memory.
        host: change in host bytes of the same rank.
        received: dict from process group to the change in received bytes, on the rank that receives most.
        seconds: dict from part of the step to the change in seconds.
    """

    flag: str
    memory: Mapping[str, float]
    host: float
    received: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def memory_sum(self) -> float:
        """Change in device memory in bytes, summed over the table's rows."""
        return sum(self.memory.values())

    @property
    def seconds_sum(self) -> float:
        """Change in step time in seconds, summed over its parts."""
        return sum(self.seconds.values())

    def text(self) -> str:
        """Return the difference as a table."""
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
    """Split ``--flag``, ``--flag value`` or several flags in one argument.

    Raises:
        SettingsError: the planner does not support the flag.
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


def difference(flag: str, before: Plan, after: Plan) -> Difference:
    """Return the changes in memory, communication and time from plan ``before`` to plan ``after``."""

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
    "--cp-shard-vocabulary --fused-linear-cross-entropy",
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
    # Full recomputation leaves nothing to recompute or swap in part, and training refuses both together.
    FULL: {"--recompute-norm --recompute-activation-function", *_SWAPPED},
    "--recompute-norm --recompute-activation-function": {FULL},
    **{flag: {FULL, *_SWAPPED} for flag in _SWAPPED},
}
_VERDICTS = (FITS, TIGHT, TOO_LARGE)


@dataclass(frozen=True)
class Way:
    """Flags that save memory, and their effect on a plan.

    Attributes:
        flags: flags in addition to the job's own.
        memory: change in bytes on the rank with the largest memory.
        seconds: change in seconds of a step.
        verdict: verdict on the plan with the flags.
    """

    flags: str
    memory: float
    seconds: float
    verdict: str


def ways(before: Plan, planned: Callable[[list[str]], Plan]) -> list[Way]:
    """Return the effect of each flag that saves memory, then of a combination of flags if it fits better.

    Args:
        before: plan that does not fit.
        planned: function from additional command line words to the job's plan with them.
    """

    def way(chosen: Sequence[str]) -> Way | None:
        words = " ".join(chosen)
        try:
            after = planned(shlex.split(words))
        except SettingsError:  # the flags exclude each other or the job's flags
            return None
        saved = after.worst.total - before.worst.total
        return Way(words, saved, after.time.total - before.time.total, after.verdict)

    # A saving below 0.05 GiB is not worth a row.
    single = [effect for flag in MEMORY_FLAGS if (effect := way([flag])) and effect.memory < -0.05 * GIB]
    # Greedy: add flags, cheapest first, and drop an earlier one if the later flag is better without it.
    combined: list[str] = []
    best: Way | None = None
    for flag in sorted(single, key=lambda each: each.seconds):
        if best and best.verdict == FITS:
            break
        free = [name for name in combined if name not in _EXCLUDED.get(flag.flags, ())]
        without = ([name for name in free if name != other] for other in free)
        for kept in (free, *without):
            tried = way([*kept, flag.flags])
            if tried and (best is None or tried.memory < best.memory):
                combined, best = [*kept, flag.flags], tried
                break
    # Drop flags that later ones made unnecessary.
    for spare in reversed(combined[:-1]):
        fewer = [other for other in combined if other != spare]
        tried = way(fewer)
        if best and tried and tried.verdict == best.verdict == FITS and tried.seconds <= best.seconds:
            combined, best = fewer, tried
    reached = min((_VERDICTS.index(effect.verdict) for effect in single), default=len(_VERDICTS))
    if best is None or len(combined) < 2 or _VERDICTS.index(best.verdict) > reached:
        return single
    quicker = [
        effect for effect in single if effect.verdict == best.verdict and effect.seconds <= best.seconds
    ]
    return single if quicker else [*single, best]


def text_of_ways(useful: list[Way], devices: int) -> str:
    """Return the table of :func:`ways`, with the advice to search if nothing fits.

    Args:
        useful: result of :func:`ways`.
        devices: job's number of devices.
    """
    rows = [("what saves memory", "GiB", "step [s]", "then")]
    together = [way for way in useful if way.flags not in MEMORY_FLAGS]
    for way in useful:
        name = "together, as below" if way in together else way.flags
        rows.append((name, f"{way.memory / GIB:+.1f}", f"{way.seconds:+.2f}", way.verdict))
    lines = aligned(rows) if useful else []
    lines += [line for way in together for line in shown(shlex.split(way.flags))]
    if not any(way.verdict == FITS for way in useful):
        lines.append(f"No flags make this layout fit; plan --search looks for others of {devices} devices.")
    return "\n".join(lines)
