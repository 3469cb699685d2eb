"""Results of a comparison as one plain dictionary, the content of ``compare.json``."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mindspeed_dsa.patches import versions
from mindspeed_dsa.runs.metrics import Record, is_number
from mindspeed_dsa.session.start_report import REPORT_FILE
from mindspeed_dsa.tools.compare.job import WEIGHTS, Run
from mindspeed_dsa.tools.compare.sides import Sides

COMPARED = ("lm_loss", "grad_norm", "indexer_loss")
"""Metrics that agree between the sides if the feature does not change results."""
MEASURED = ("step_time_s", "tokens_per_s", "peak_memory_bytes")
Records = dict[str, list[Record]]
"""Dict from a run's name to its records."""
Digests = dict[str, dict[str, Any]]
"""Dict from ``"rank 0: decoder.layers.0..."`` to ``{"sha256", "dtype", "shape"}``."""


def build(
    sides: Sides, runs: Sequence[Run], records: Records, wanted_warmup: int, checkpoint: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the content of ``compare.json``; times and losses are only included if both sides ran."""
    trained = [run for run in runs if run.repeat]
    of_side = {
        side: [records[r.name] for r in trained if r.side == side and r.name in records] for side in "AB"
    }
    reports, damaged = {}, []
    for run in trained:
        try:
            reports[run.name] = _report(run.folder)
        except ValueError as error:
            damaged.append(f"{run.name}: {error}, so it is not known which features were on in it")
    failed = [run for run in runs if run.problem]
    result: dict[str, Any] = {
        "ok": not failed,
        "sides": {side: _side(side, sides, reports) for side in "AB"},
        "features_compared": list(sides.features),
        "runs": [_run(run) for run in runs],
        "versions": versions.installed(),
        "problems": [f"{run.name}: {run.problem}; see {run.log}" for run in failed],
        "warnings": [*damaged, *_unlike_asked(sides, reports)],
    }
    if failed or not all(of_side.values()):
        return result
    everything = [*of_side["A"], *of_side["B"]]
    skip = warmup(everything, wanted_warmup)
    a, b = (measured(of_side[side], skip) for side in "AB")
    first_a, first_b = of_side["A"][0], of_side["B"][0]
    result |= {
        "steps": {"A": len(first_a), "B": len(first_b), "left_out_of_times": skip},
        "initial_weights": _initial_weights(trained, checkpoint),
        "measured": {
            name: {"A": a[name], "B": b[name], "ratio": ratio(a[name], b[name])}
            for name in MEASURED
            if name in a and name in b
        },
        "compared": {
            name: {
                **metric_difference,
                "noise": {side: noise(of_side[side], name) for side in "AB"},
            }
            for name in COMPARED
            if (metric_difference := difference(first_a, first_b, name)) is not None
        },
    }
    if len(first_a) != len(first_b):
        result["warnings"].append(
            f"A ran {len(first_a)} steps and B {len(first_b)}; only the steps of both are compared"
        )
    return result


def _side(side: str, sides: Sides, reports: dict[str, dict[str, Any] | None]) -> dict[str, Any]:
    report = reports.get(f"{side}1")
    return {
        "flags": list(sides.flags(side)),
        "features_on": _on(report) if report else None,
        "platform": report["platform"] if report else None,
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "folder": str(run.folder),
        "command": shlex.join(run.command),
        "exit_code": run.exit_code,
        "wall_s": round(run.wall_s, 3),
        "problem": run.problem,
    }


def _initial_weights(trained: Sequence[Run], checkpoint: dict[str, Any] | None) -> dict[str, Any]:
    try:
        digests = {run.name: weights_of_run(run.folder / WEIGHTS) for run in trained}
    except ValueError as error:
        return {"same": None, "how": f"not verified: {error}"}
    return compare_weights(digests, checkpoint)


def _report(folder: Path) -> dict[str, Any] | None:
    """Read the report that the library wrote at the start of a run, or return None.

    Raises:
        ValueError: the file is damaged.
    """
    # A job may write its report into a subfolder: take the one nearest to the run's folder.
    for file in sorted(folder.rglob(REPORT_FILE), key=lambda path: len(path.parts)):
        try:
            report: dict[str, Any] = json.loads(file.read_bytes())
            _on(report), report["platform"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{file} is no record of this library ({error!r}); compare again") from None
        return report
    return None


def _on(report: dict[str, Any]) -> list[str]:
    return [feature["name"] for feature in report["features"]]


def _unlike_asked(sides: Sides, reports: dict[str, dict[str, Any] | None]) -> list[str]:
    """Return warnings if the runs' reports show a compared feature on in A or off in B."""
    warnings = []
    for name, report in reports.items():
        if report is None:
            if name[0] == "B":
                warnings.append(
                    f"{name} left no {REPORT_FILE}, so it is unknown which features were on in it"
                )
            continue
        for feature in sides.features:
            if (feature in _on(report)) != (name[0] == "B"):
                state = "on" if name[0] == "A" else "off"
                warnings.append(f"{feature} was {state} in {name}, so the sides do not match the request")
    return warnings


# -- figures of steps --------------------------------------------------------------------------


def warmup(runs: Sequence[Sequence[Record]], wanted: int) -> int:
    """Return the number of warmup steps to exclude from the times; every run keeps at least one step."""
    return max(0, min(wanted, *(len(records) - 1 for records in runs)))


def measured(runs: Sequence[Sequence[Record]], skip: int) -> dict[str, dict[str, Any]]:
    """Return a dict from metric to one side's statistics: median over the runs, and each run's value.

    A run's time is the median over its steps after the first ``skip`` ones. A run's memory is the maximum
    over all of its steps.
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
    """Return the ratio B / A of the medians, and of each pair of consecutive runs.

    ``within_noise`` is true if the ranges of both sides overlap, so that the ratio is not significant; None
    if a side has only one run.
    """
    # Consecutive runs of A and B: a slow drift of the machine cancels in their ratio.
    pairs = [y / x for x, y in zip(a["runs"], b["runs"], strict=False) if x]
    several = len(a["runs"]) > 1 and len(b["runs"]) > 1
    overlap = a["min"] <= b["max"] and b["min"] <= a["max"]
    return {
        "of_medians": b["median"] / a["median"] if a["median"] else None,
        "of_runs": pairs,
        "within_noise": overlap if several else None,
    }


def difference(a: Sequence[Record], b: Sequence[Record], name: str) -> dict[str, Any] | None:
    """Return the difference of one metric between a run of A and a run of B, over their common steps.

    Returns:
        None if neither run has the metric. Else a dict with the number of common ``steps``, ``first_step``
        with unequal bits or None, ``max_abs`` with its step, ``max_rel``, the ``last`` values, and the first
        step with a non-finite value on each side.
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
    """Return the differences of one metric between a side's first and later runs; None with only one run."""
    differences = [d for d in (difference(runs[0], other, name) for other in runs[1:]) if d is not None]
    if not differences:
        return None
    firsts = [d["first_step"] for d in differences if d["first_step"] is not None]
    return {
        "first_step": min(firsts, default=None),
        "max_abs": max((d["max_abs"] for d in differences if d["max_abs"] is not None), default=None),
    }


def _pairs(a: Sequence[Record], b: Sequence[Record], name: str) -> list[tuple[int, Any, Any]]:
    there = {record["step"]: record.get(name) for record in b}
    return [(r["step"], r.get(name), there[r["step"]]) for r in a if r["step"] in there]


def _same(x: Any, y: Any) -> bool:
    # NaN counts as equal to NaN: both sides diverged at this step.
    return x == y or (is_number(x) and is_number(y) and math.isnan(x) and math.isnan(y))


def _first_not_finite(records: Sequence[Record], name: str) -> int | None:
    return next((r["step"] for r in records if is_number(r.get(name)) and not math.isfinite(r[name])), None)


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _as_json(value: Any) -> Any:
    """Replace non-finite numbers, which JSON does not have, by strings."""
    return str(value) if is_number(value) and not math.isfinite(value) else value


def _quantile(ordered: Sequence[float], part: float) -> float | None:
    return ordered[round(part * (len(ordered) - 1))] if ordered else None


# -- initial weights ---------------------------------------------------------------------------


def weights_of_run(folder: Path) -> Digests:
    """Read the digests that the feature initial-weights wrote into a run's folder; empty without files.

    Raises:
        ValueError: a file is damaged.
    """
    digests: Digests = {}
    for file in sorted(folder.glob("weights-rank*.json")):
        try:
            content = json.loads(file.read_bytes())
            for name, digest in content["parameters"].items():
                _form(digest)
                digests[f"rank {content['rank']}: {name}"] = digest
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} holds no digests of weights ({error!r}); compare again") from None
    return digests


def digest_of_files(folder: Path) -> str:
    """Return one SHA-256 of names and contents of all files in a folder and its subfolders."""
    sha = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        sha.update(f"{path.relative_to(folder)} {content}\n".encode())
    return sha.hexdigest()


def compare_weights(
    runs: Mapping[str, Digests], checkpoint: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Compare the initial weights of every run with the first run's weights.

    Args:
        runs: dict from the run's name to its digests, in the order of the runs.
        checkpoint: ``{"folder", "unchanged"}`` of the initial weights that all runs loaded, if there is one.

    Returns:
        A dict with ``same`` (None if unknown) and ``how``, a sentence.
    """
    names = list(runs)
    if len(names) < 2:
        return {"same": None, "how": "not verified: there are not two runs"}
    first, reference = names[0], runs[names[0]]
    # Without digests of every run, nothing is known about the weights.
    silent = [name for name in names if not runs[name]]
    if silent:
        return {
            "same": None,
            "how": f"not verified: {', '.join(silent)} wrote no digests; does the job import "
            "mindspeed_dsa.megatron_adaptor, and train through Megatron-core's schedules?",
        }
    loaded = f"all runs loaded {checkpoint['folder']}" if checkpoint and checkpoint["unchanged"] else ""
    remarks = []
    for name in names[1:]:
        shared = reference.keys() & runs[name].keys()
        alike = [key for key in shared if _form(reference[key]) == _form(runs[name][key])]
        differing = sorted(key for key in alike if reference[key] != runs[name][key])
        if differing:
            return {
                "same": False,
                "how": f"{len(differing)} of {len(alike)} weights differ between {first} and {name} before "
                f"the first step, e.g. {differing[0]}",
            }
        if not alike or len(alike) < len(shared):
            # Digests of weights with another dtype or sharding cannot be compared.
            how = f"parameters of {first} and {name} differ in dtype or in sharding"
            return {"same": True if loaded else None, "how": f"{loaded or 'not verified'}; {how}"}
        extra = len(reference.keys() ^ runs[name].keys())
        if extra:
            remarks.append(f"{extra} parameters exist in only one of {first} and {name}")
    how = f"SHA-256 of all {len(reference)} parameters, taken in each run before its first step, are equal"
    return {"same": True, "how": "; ".join(filter(None, [how, loaded, *dict.fromkeys(remarks)]))}


def _form(digest: Mapping[str, Any]) -> tuple[Any, Any]:
    return digest["dtype"], tuple(digest["shape"])
