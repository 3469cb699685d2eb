"""Figures of the runs: medians, spreads, and from which step on two runs differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from mindspeed_dsa.runs.metrics import Record, is_number

COMPARED = ("lm_loss", "grad_norm", "indexer_loss")
"""Metrics that must agree between the sides if a feature claims not to change them."""
MEASURED = ("step_time_s", "tokens_per_s", "peak_memory_bytes")


def warmup(runs: Sequence[Sequence[Record]], wanted: int) -> int:
    """Number of steps to exclude from the times; short runs keep at least one step."""
    return max(0, min(wanted, *(len(records) - 1 for records in runs)))


def measured(runs: Sequence[Sequence[Record]], skip: int) -> dict[str, dict[str, Any]]:
    """Return one side's figures: for each the median over its runs, and each run's own.

    Times are medians over a run's steps without the first ``skip``, memory is a run's largest.
    """
    result = {}
    for name in MEASURED:
        per_run = []
        for records in runs:
            values = [r[name] for r in records if is_number(r.get(name))]
            if name != "peak_memory_bytes":
                values = values[skip:] or values
            if values:
                per_run.append(max(values) if name == "peak_memory_bytes" else median(values))
        if per_run:
            result[name] = {
                "median": median(per_run),
                "runs": per_run,
                "min": min(per_run),
                "max": max(per_run),
            }
    if "step_time_s" in result:
        times = (r.get("step_time_s") for records in runs for r in records[skip:])
        steps = sorted(time for time in times if is_number(time) and time)
        result["step_time_s"]["quartiles_of_steps"] = [_quantile(steps, 0.25), _quantile(steps, 0.75)]
    return result


def ratio(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """B over A: of the medians, and of the runs that followed each other.

    ``within_noise``: the sides' runs overlap, so that their order is not significant; ``None`` for one run
    each.
    """
    pairs = [y / x for x, y in zip(a["runs"], b["runs"], strict=False) if x]
    several = len(a["runs"]) > 1 and len(b["runs"]) > 1
    overlap = a["min"] <= b["max"] and b["min"] <= a["max"]
    return {
        "of_medians": b["median"] / a["median"] if a["median"] else None,
        "of_runs": pairs,
        "within_noise": overlap if several else None,
    }


def difference(a: Sequence[Record], b: Sequence[Record], name: str) -> dict[str, Any] | None:
    """Difference of one metric between run B and run A, over the steps that both ran.

    Returns:
        ``None`` if neither run has the figure at all; else ``steps``, ``first_step`` (first one at which
        they are not equal to the last bit, ``None`` if there is none), ``max_abs`` and ``max_rel`` with the
        step of the former, the figures of the last step, and the first step with a non-finite value.
    """
    pairs = _pairs(a, b, name)
    if all(x is None and y is None for _, x, y in pairs):
        return None
    first = next((step for step, x, y in pairs if not _same(x, y)), None)
    gaps = [(abs(y - x), step, x) for step, x, y in pairs if _is_finite(x) and _is_finite(y)]
    largest = max(gaps, default=None, key=lambda gap: gap[0])
    return {
        "steps": len(pairs),
        "first_step": first,
        "max_abs": largest[0] if largest else None,
        "max_abs_step": largest[1] if largest else None,
        "max_rel": max((gap / abs(x) for gap, _, x in gaps if x), default=None),
        "last": [_as_json(value) for value in pairs[-1][1:]] if pairs else [None, None],
        "not_finite": [_first_not_finite(a, name), _first_not_finite(b, name)],
    }


def noise(runs: Sequence[Sequence[Record]], name: str) -> dict[str, Any] | None:
    """Differences of the runs of one side from its first; ``None`` for one run."""
    found = [d for d in (difference(runs[0], other, name) for other in runs[1:]) if d is not None]
    if not found:
        return None
    firsts = [d["first_step"] for d in found if d["first_step"] is not None]
    return {
        "first_step": min(firsts, default=None),
        "max_abs": max((d["max_abs"] for d in found if d["max_abs"] is not None), default=None),
    }


def _pairs(a: Sequence[Record], b: Sequence[Record], name: str) -> list[tuple[int, Any, Any]]:
    there = {record["step"]: record.get(name) for record in b}
    return [(r["step"], r.get(name), there[r["step"]]) for r in a if r["step"] in there]


def _same(x: Any, y: Any) -> bool:
    return x == y or (is_number(x) and is_number(y) and math.isnan(x) and math.isnan(y))


def _first_not_finite(records: Sequence[Record], name: str) -> int | None:
    return next((r["step"] for r in records if is_number(r.get(name)) and not math.isfinite(r[name])), None)


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _as_json(value: Any) -> Any:
    """Replace non-finite numbers, which JSON cannot represent."""
    return str(value) if is_number(value) and not math.isfinite(value) else value


def _quantile(ordered: Sequence[float], part: float) -> float | None:
    return ordered[round(part * (len(ordered) - 1))] if ordered else None
