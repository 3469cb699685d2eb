"""Differences that one more flag makes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.session.start_report import aligned
from mindspeed_dsa.tools.planner import communication, flags
from mindspeed_dsa.tools.planner.memory import GIB
from mindspeed_dsa.tools.planner.plan import Plan
from mindspeed_dsa.tools.planner.report import memory_rows


@dataclass(frozen=True)
class Difference:
    """Difference of two plans, with minus without.

    Attributes:
        flag: as given.
        memory: bytes on the rank that needs most, by row.
        host: bytes there on the host.
        received: bytes of the rank that receives most, by group.
        seconds: of a step, by part.
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
    known = flags.parser()._option_string_actions
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
        chosen: as given.
        before: without any of them.
        planned: makes a plan with more words on the job's command line.
    """
    return [of(flag, before, planned(words_of(flag))) for flag in chosen]


def of(flag: str, before: Plan, after: Plan) -> Difference:
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
