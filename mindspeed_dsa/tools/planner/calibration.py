"""Calibration of a device by measured steps.

A factor is fitted for each entry of :data:`SCALED`. Different factors can explain one step time, so the fit
prefers factors near 1. It minimises Huber's loss of ``ln(planned / measured)`` and the squares of all
``ln(factor)``, each divided by its expected size (:data:`APART`, :attr:`Scale.spread`).
With Huber's loss one untuned job, which takes twice the planned time, does not decide about the links.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_dsa.session.start_report import aligned
from mindspeed_dsa.tools.planner import plan
from mindspeed_dsa.tools.planner.devices import Device
from mindspeed_dsa.tools.planner.job import Job
from mindspeed_dsa.tools.planner.measured import Record
from mindspeed_dsa.tools.planner.memory import GIB
from mindspeed_dsa.tools.planner.plan import Plan
from mindspeed_dsa.tools.planner.timing import Estimate

APART = math.log(1.14)
"""Expected |ln(planned / measured)| of a calibrated job: the typical factor of published runs."""
_HUBER = 1.5
"""Multiple of :data:`APART` beyond which a difference counts linearly."""
_ROUNDS, _STEP, _HALVINGS = 6, 0.05, 4
_SHARE = 0.05
"""Smallest share of a step that a part has which is named as an explanation of the rest."""
_MOST = 4.0
"""Largest factor on a part that is named as an explanation of the rest, and on a step of the same device."""


@dataclass(frozen=True)
class Scale:
    """Values of a device that one factor scales.

    Attributes:
        names: attributes of :class:`Device`.
        spread: expected |ln(factor)|.
        limit: largest factor, and one over the smallest.
    """

    names: tuple[str, ...]
    spread: float
    limit: float


SCALED = {
    # Published runs ask for 5 to 11 ms instead of the 9 of a layer with experts.
    "host time": Scale(("host_experts", "host_dense"), math.log(1.3), 3.0),
    # Published runs determine the links' shares of their nameplate to about a fifth.
    "link rates": Scale(("link", "network"), math.log(1.2), 2.5),
}
"""Dict from the name of a group of values to the values of the device."""


@dataclass(frozen=True)
class Compared:
    """A measured step with plans of its job.

    Attributes:
        record: measurement.
        before: plan on the device as given.
        after: plan on the calibrated device.
    """

    record: Record
    before: Plan
    after: Plan

    @property
    def rest(self) -> float:
        """Measured time over the time planned after calibration."""
        return self.record.seconds / self.after.time.total


@dataclass(frozen=True)
class Calibration:
    """Result of :func:`calibrated`.

    Attributes:
        device: device with the calibrated values.
        factors: dict from a key of :data:`SCALED` to its factor.
        runs: measured steps with their plans.
    """

    device: Device
    factors: Mapping[str, float]
    runs: Sequence[Compared]

    def as_dict(self) -> dict[str, Any]:
        """Return the calibration as plain data for JSON."""
        return {
            "factors": dict(self.factors),
            "runs": [
                {
                    "name": run.record.name,
                    "measured": run.record.seconds,
                    "before": run.before.time.total,
                    "after": run.after.time.total,
                    "rest": run.rest,
                    "memory_measured": run.record.memory,
                    "memory_planned": run.after.worst.allocated / GIB,
                }
                for run in self.runs
            ],
            "explanations": explanations(self.runs),
        }


def calibrated(
    records: Sequence[Record], job_of: Callable[[Record], Job], device: Device, allocator: float
) -> Calibration:
    """Fit the factors of :data:`SCALED` to measured steps.

    Args:
        records: measured steps, at least one.
        job_of: function that returns the job of a record.
        device: device that all of them ran on.
        allocator: assumed overhead of the allocator, as a share of the tensors' bytes.
    """
    before = [plan.make(job_of(record), device, allocator) for record in records]

    def apart(logs: Sequence[float]) -> list[float]:
        """Return ln(measured / planned) of each record on a scaled device."""
        other = scaled(device, dict(zip(SCALED, map(math.exp, logs), strict=True)))
        times = [Estimate(each.job, other, each.ranks, each.transfers).step().total for each in before]
        return [math.log(record.seconds / time) for record, time in zip(records, times, strict=True)]

    factors = dict(zip(SCALED, map(math.exp, _fitted(apart)), strict=True))
    other = scaled(device, factors)
    after = [plan.make(each.job, other, allocator) for each in before]
    runs = [Compared(*each) for each in zip(records, before, after, strict=True)]
    return Calibration(other, factors, runs)


def scaled(device: Device, factors: Mapping[str, float]) -> Device:
    """Return a device with the values of :data:`SCALED` multiplied by their factors."""
    values = {
        name: factor * getattr(device, name) for key, factor in factors.items() for name in SCALED[key].names
    }
    return replace(device, **values)


def _fitted(apart: Callable[[Sequence[float]], list[float]]) -> list[float]:
    """Return the factors' logarithms with the least squares, by Gauss-Newton steps.

    Args:
        apart: function from the factors' logarithms to ln(measured / planned) of each run.
    """
    scales = list(SCALED.values())

    def cost(logs: Sequence[float], rest: Sequence[float]) -> float:
        squares = sum((log / scale.spread) ** 2 for log, scale in zip(logs, scales, strict=True))
        return squares + sum(_huber(each / APART) for each in rest)

    logs = [0.0] * len(scales)
    rest = apart(logs)
    for _ in range(_ROUNDS):
        # ln(planned) grows by as much as ln(measured / planned) shrinks.
        moved = [
            apart([log + _STEP * (own == one) for own, log in enumerate(logs)]) for one in range(len(logs))
        ]
        slopes = [[(old - new) / _STEP for old, new in zip(rest, each, strict=True)] for each in moved]
        change = _change(slopes, rest, logs)
        for halving in range(_HALVINGS):
            tried = [
                max(-math.log(scale.limit), min(math.log(scale.limit), log + each / 2**halving))
                for log, each, scale in zip(logs, change, scales, strict=True)
            ]
            left = apart(tried)
            if cost(tried, left) < cost(logs, rest):
                break
        else:
            break
        largest = max(abs(new - old) for new, old in zip(tried, logs, strict=True))
        logs, rest = tried, left
        if largest < _STEP / 10:
            break
    return logs


def _change(slopes: Sequence[Sequence[float]], rest: Sequence[float], logs: Sequence[float]) -> list[float]:
    """Return the change of the logarithms that solves the linearised least squares."""
    count = range(len(logs))
    spreads = [scale.spread for scale in SCALED.values()]

    # Reweighted least squares, which has the gradient of Huber's loss.
    weights = [min(1.0, _HUBER * APART / abs(each)) if each else 1.0 for each in rest]

    def dot(left: Sequence[float], right: Sequence[float]) -> float:
        return sum(w * a * b for w, a, b in zip(weights, left, right, strict=True)) / APART**2

    rows = [
        [
            *(dot(slopes[row], slopes[column]) + (row == column) / spreads[row] ** 2 for column in count),
            dot(slopes[row], rest) - logs[row] / spreads[row] ** 2,
        ]
        for row in count
    ]
    # Gauss-Jordan; the matrix is positive definite, so that no pivot is zero.
    for pivot in count:
        rows[pivot] = [value / rows[pivot][pivot] for value in rows[pivot]]
        for row in count:
            if row != pivot:
                factor = rows[row][pivot]
                rows[row] = [value - factor * own for value, own in zip(rows[row], rows[pivot], strict=True)]
    return [row[-1] for row in rows]


def _huber(value: float) -> float:
    size = abs(value)
    return size**2 if size <= _HUBER else _HUBER * (2 * size - _HUBER)


def explanations(runs: Sequence[Compared]) -> dict[str, float]:
    """Return the factor on each part of a step which, alone, would explain the rest of all runs best.

    Only parts are included that leave half of the rest or less. The best explanation comes first.
    """
    parts = dict.fromkeys(part for run in runs for part in run.after.time.parts)
    whole = _left([run.rest for run in runs])
    found: dict[str, tuple[float, float]] = {}
    for part in parts:
        own = [run.after.time.parts.get(part, 0.0) for run in runs]
        totals = [run.after.time.total for run in runs]
        if max(value / total for value, total in zip(own, totals, strict=True)) < _SHARE:
            continue
        # Least squares of the runs' differences, relative to their times.
        shares = [value / run.record.seconds for run, value in zip(runs, own, strict=True)]
        lacking = [1 - total / run.record.seconds for run, total in zip(runs, totals, strict=True)]
        wanted = sum(share * each for share, each in zip(shares, lacking, strict=True))
        factor = 1 + wanted / sum(share**2 for share in shares)
        if not 1 / _MOST <= factor <= _MOST:
            continue
        left = _left(
            [
                run.record.seconds / (total + (factor - 1) * value)
                for run, total, value in zip(runs, totals, own, strict=True)
            ]
        )
        if left <= whole / 2:
            found[part] = (left, factor)
    return {part: factor for part, (_, factor) in sorted(found.items(), key=lambda each: each[1])}


def _left(ratios: Sequence[float]) -> float:
    return statistics.fmean(abs(math.log(ratio)) for ratio in ratios)


def text(found: Calibration) -> str:
    """Return the calibration as text for a terminal."""
    rows: list[tuple[str, ...]] = [
        ("run", "measured [s]", "planned [s]", "calibrated [s]", "measured / calibrated")
    ]
    for run in found.runs:
        times = (run.record.seconds, run.before.time.total, run.after.time.total)
        title = f"{run.record.name}: {run.after.job.layout} on {run.after.job.layout.devices}"
        rows.append((title, *(f"{value:.3g}" for value in times), f"{run.rest:.2f}"))
    lines = [
        *aligned(rows),
        _changes(found),
        *_at_limits(found.factors),
        *_rest(found.runs),
    ]
    for run in found.runs:
        lines += _remarks(run)
    return "\n".join(lines)


def _changes(found: Calibration) -> str:
    """Return a line with the factors, and with flags for the links if they changed by 1 % or more."""
    changed = {name: factor for name, factor in found.factors.items() if abs(math.log(factor)) >= 0.01}
    if not changed:
        return f"calibrated: nothing, {' and '.join(found.factors)} stay as assumed"
    said = ", ".join(f"{name} x {factor:.2f}" for name, factor in changed.items())
    device = found.device
    flags = f"; these links as flags: --device-link {device.link:.3g} --device-network {device.network:.3g}"
    return f"calibrated: {said}{flags if 'link rates' in changed else ''}"


def _at_limits(factors: Mapping[str, float]) -> list[str]:
    wide = [name for name, factor in factors.items() if abs(math.log(factor)) > 2 * SCALED[name].spread]
    if not wide:
        return []
    return [
        (
            f"warning: {' and '.join(wide)} differ more than clusters do; check that the flags, devices and "
            "--device are those of the measured run"
        )
    ]


def _rest(runs: Sequence[Compared]) -> list[str]:
    """Return lines about the difference that calibration leaves."""
    typical = math.exp(_left([run.rest for run in runs]))
    beyond = [run for run in runs if not 1 / plan.SPREAD <= run.rest <= plan.SPREAD]
    lines = [f"the rest is a typical factor of {typical:.2f}; plans of tuned jobs are within {plan.SPREAD:g}"]
    for run in beyond:
        name, ratio = run.record.name, run.rest
        if ratio > _MOST:
            lines.append(
                f"{name} takes {ratio:.3g} times as long as planned: is --device the run's device, and "
                "did no other job share it?"
            )
        elif ratio > 1:
            lines.append(
                f"{name} takes {ratio:.2f} times as long as planned: as untuned or deterministic jobs do, "
                "and those with one microbatch or unfused activations"
            )
        else:
            lines.append(
                f"{name} takes {ratio:.2f} of the planned time: are its layers, sequence length and "
                "recomputation those of the flags?"
            )
    alone = [f"{part} x {factor:.2f}" for part, factor in list(explanations(runs).items())[:3]]
    if typical > math.exp(APART) and alone:
        lines.append(f"the rest is explained if one part takes longer or shorter: {' or '.join(alone)}")
    return lines


def _remarks(run: Compared) -> list[str]:
    """Return lines about a run's memory and the spread of its steps."""
    record, lines = run.record, []
    if record.spread > 1.1:
        lines.append(
            f"{record.name}: one step in ten takes {record.spread:.2f} times the median or more; slow ranks, "
            "data or imbalance are not planned"
        )
    # The peak on a CPU is of the whole process.
    if record.memory is not None and run.after.device.name != "cpu":
        planned = run.after.worst.allocated / GIB
        lines.append(
            f"{record.name}: {record.memory:.1f} GiB allocated, {planned:.1f} planned, "
            f"x {record.memory / planned:.2f}"
        )
    return lines
