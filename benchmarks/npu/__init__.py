"""First hour on an Ascend NPU: operators, layers, ranks, features, and one report of all problems.

The parts compare torch_npu's operators with the same computation in PyTorch, forward and backward, at the
sizes of DeepSeek-V3.2 and GLM-5; a layer with fused DSA and with Megatron's own; several ranks with one; and
features off and on. The report lists deviations, operators slower than the reference, and refusals with their
reasons. Every part is its own process: a part that fails, or leaves the device in a bad state, costs only its
own figures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import parts
from benchmarks.npu import ranks, stand_ins, words
from benchmarks.registry import Metrics

OPERATOR_PARTS = ("indexer", "attention", "loss", "dense_loss", "dense", "experts", "small")
_STEPS = ("layer", "memory")
PARTS = {
    "machine": 60,
    **dict.fromkeys(OPERATOR_PARTS, 200),
    "layer": 480,
    "ranks": 900,
    "memory": 480,
    "profile": 240,
}
"""Guaranteed seconds of each part. Time that other parts leave is added."""
LIMIT = 3600
"""Seconds of all parts together, the report included."""
_REPORT = 10
_DEVICE_ONLY = "profile"


def run(device: str, quick: bool = False, report: str | None = None, only: str | None = None) -> Metrics:
    """Return all metrics of the case.

    ``failed`` has failures by part; ``slower`` operators and steps slower than their reference; ``refused``
    inputs that an operator declines here, with its reason; ``not_compared`` results without a reference.

    Args:
        device: device to run on. Without an NPU the case exits, unless ``quick``: then the stand-ins of
            ``tests/npu`` take its place.
        quick: tiny problems.
        report: folder for ``report.md`` and the parts' logs; ``runs/npu`` if None.
        only: comma-separated parts.
    """
    started = time.monotonic()
    if device != "npu" and not quick:
        raise SystemExit(why_no_npu())
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    if device != "npu":
        environment |= stand_ins.environment()
    names = parts.chosen("npu", PARTS, only)
    if device != "npu" and only is None:
        names.remove(_DEVICE_ONLY)
    folder = Path(report or "runs/npu").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    figures = parts.run(
        "benchmarks.npu.part",
        names,
        PARTS,
        folder,
        quick=quick,
        seconds=LIMIT - _REPORT - (time.monotonic() - started),
        environment=environment,
    )
    figures |= verdict(figures, {name: skipped(folder / f"{name}.log") for name in _STEPS if name in names})
    name = _device_name() if device == "npu" else "Stand-ins for an NPU: figures mean nothing"
    (folder / "report.md").write_text(words.report(figures, name, OPERATOR_PARTS), encoding="utf-8")
    print(f"report: {folder / 'report.md'}", file=sys.stderr, flush=True)
    return figures


def why_no_npu() -> str:
    """Return the reason why there is no NPU."""
    from mindspeed_dsa import platforms
    from mindspeed_dsa.patches.errors import SettingsError

    try:
        platforms.get("npu").is_available()
    except SettingsError as error:
        return f"npu: {error}"
    return (
        "npu: torch_npu sees no NPU; source CANN's set_env.sh, check npu-smi info and "
        "ASCEND_RT_VISIBLE_DEVICES, or run make npu ARGS=--quick, which shows with a stand-in for an NPU "
        "that the programs run"
    )


def skipped(log: Path) -> list[str]:
    """Return the operators that fell back to PyTorch by a part's log, each once."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return list(dict.fromkeys(line.partition(": ")[2] for line in lines if " is skipped for " in line))


def verdict(found: Mapping[str, Any], fallbacks: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return ``failed``, ``slower``, ``refused`` and ``not_compared``, each by operator or case.

    Args:
        found: figures of each part.
        fallbacks: results of :func:`skipped`, by part of training steps.
    """
    failed = {name: found[name]["error"] for name in PARTS if "error" in found.get(name, {})}
    slower: dict[str, str] = {}
    refused: dict[str, str] = {}
    not_compared: dict[str, str] = {}
    for part in OPERATOR_PARTS:
        for what, row in parts.rows_of(found, part).items():
            if "error" in row:
                failed[what] = row["error"]
            elif "refused" in row:
                refused[what] = row["refused"]
            elif "apart" not in row:
                not_compared[what] = row["reference"]
            failed |= {f"{what}, {result}": why for result, why in row.get("wrong", {}).items()}
            for direction in ("forward", "backward"):
                figures = row.get(direction, {})
                if figures.get("speedup", 1.0) < 1:
                    slower[f"{what}, {direction}"] = (
                        f"{figures['ms']:.3g} ms, {row['reference']} {figures['reference_ms']:.3g} ms"
                    )
    for part in _STEPS:
        for number, reason in enumerate(fallbacks.get(part, ()), 1):
            refused[f"{part}, {number}"] = reason
        for case, row in parts.rows_of(found, part).items():
            if "refused" in row:
                failed[f"{part}, {case}"] = row["refused"]
            if row.get("speedup", 1.0) < 1:
                slower[f"{part}, {case}"] = f"fused DSA takes {1 / row['speedup']:.2f} times as long as stock"
    for case, row in parts.rows_of(found, "ranks").items():
        if "refused" in row:
            failed[f"ranks, {case}"] = row["refused"]
        if "absent" in row:
            not_compared[f"ranks, {case}"] = row["absent"]
        for name, figures in row.get("rows", {}).items():
            if "error" in figures:
                failed[f"ranks, {case}, {name}"] = figures["error"]
        if case.endswith(tuple(ranks.SWITCHES)) and row.get("step_ratio", 0.0) > 1:
            slower[f"ranks, {case}"] = f"a step takes {row['step_ratio']:.2f} times as long as without it"
    missing = found.get("machine", {}).get("missing", {})
    return {
        "failed": failed,
        "slower": slower,
        "refused": {**missing, **refused},
        "not_compared": not_compared,
    }


def _device_name() -> str:
    from mindspeed_dsa import platforms

    return platforms.get("npu").device_name()
