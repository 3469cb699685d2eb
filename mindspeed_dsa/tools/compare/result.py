"""The results of a comparison as one plain dictionary: the content of ``compare.json``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_dsa.patches import versions
from mindspeed_dsa.runs.metrics import Record
from mindspeed_dsa.session.start_report import REPORT_FILE
from mindspeed_dsa.tools.compare import figures, weights
from mindspeed_dsa.tools.compare.job import WEIGHTS, Run
from mindspeed_dsa.tools.compare.sides import Sides

Records = dict[str, list[Record]]
"""Records of each run by its name."""


def build(
    sides: Sides, runs: Sequence[Run], records: Records, wanted_warmup: int, checkpoint: dict[str, Any] | None
) -> dict[str, Any]:
    """Combine the findings; figures only if both sides ran."""
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
    skip = figures.warmup(everything, wanted_warmup)
    a, b = (figures.measured(of_side[side], skip) for side in "AB")
    first_a, first_b = of_side["A"][0], of_side["B"][0]
    result |= {
        "steps": {"A": len(first_a), "B": len(first_b), "left_out_of_times": skip},
        "initial_weights": _initial_weights(trained, checkpoint),
        "measured": {
            name: {"A": a[name], "B": b[name], "ratio": figures.ratio(a[name], b[name])}
            for name in figures.MEASURED
            if name in a and name in b
        },
        "compared": {
            name: {
                **found,
                "noise": {side: figures.noise(of_side[side], name) for side in "AB"},
            }
            for name in figures.COMPARED
            if (found := figures.difference(first_a, first_b, name)) is not None
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
        digests = {run.name: weights.of_run(run.folder / WEIGHTS) for run in trained}
    except ValueError as error:
        return {"same": None, "how": f"not verified: {error}"}
    return weights.compare(digests, checkpoint)


def _report(folder: Path) -> dict[str, Any] | None:
    """The report that the library wrote when the run built its model; a job may choose its folder.

    Raises:
        ValueError: the file is damaged.
    """
    for file in sorted(folder.rglob(REPORT_FILE), key=lambda path: len(path.parts)):
        try:
            found: dict[str, Any] = json.loads(file.read_bytes())
            _on(found), found["platform"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{file} is no record of this library ({error!r}); compare again") from None
        return found
    return None


def _on(report: dict[str, Any]) -> list[str]:
    return [feature["name"] for feature in report["features"]]


def _unlike_asked(sides: Sides, reports: dict[str, dict[str, Any] | None]) -> list[str]:
    """Features that were not off in A or not on in B, according to the runs' reports."""
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
