"""Picture of a plan: memory of each pipeline rank and time of a step, by part."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_dsa.runs.metrics import pyplot_for_files
from mindspeed_dsa.tools.planner.memory import GIB
from mindspeed_dsa.tools.planner.plan import Plan
from mindspeed_dsa.tools.planner.report import memory_rows

_ACTIVATIONS = "activations: "
_PARTS = (
    "weights",
    "gradients",
    "master weights",
    "moments",
    "temporary",
    "allocator",
    "attention",
    "routed experts",
    "projections",
    "indexer",
    "norms",
    "dense MLP",
    "shared experts",
    "router",
    "output",
    "MTP",
    "embedding",
    "messages",
    "received",
    "recomputed layers",
    "waiting weight gradients",
    "recomputed",
    "memory-bound operations",
    "waiting in the pipeline",
    "optimizer",
    "swapped attention",
    "end of the step, other ranks",
    "EP transfers",
    "TP transfers",
    "CP transfers",
    "DP transfers",
    "EDP transfers",
    "PP transfers",
    "ETP transfers",
    "FSDP transfers",
    "EFSDP transfers",
    "embedding transfers",
    "permutation",
    "loss",
    "gaps between kernels",
    "launches by the host",
    "layer of both passes",
)
"""Parts of memory and time; the index decides a part's colour, so that all pictures agree."""
_HUES = 11 / 42
"""Difference in hue between neighbours in :data:`_PARTS`."""
_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}


def colour(part: str) -> tuple[float, float, float]:
    """Return the colour for a part of the model, used in both the memory bars and the time bar.

    Args:
        part: name of a row of the memory table, or of a part of the step's time.

    Returns:
        Red, green and blue, from 0 to 1.
    """
    name = part.removeprefix(_ACTIVATIONS)
    place = _PARTS.index(name) if name in _PARTS else len(_PARTS)
    # Three shades, and hues that repeat after 42 parts: hues of one shade differ by at least 3 / 42.
    lightness, saturation = ((0.45, 0.65), (0.68, 0.6), (0.3, 0.5))[place % 3]
    return colorsys.hls_to_rgb((0.58 + place * _HUES) % 1.0, lightness, saturation)


def draw(path: Path, plan: Plan) -> bool:
    """Draw stacked bars of memory with the device's limit, and one bar of a step's time.

    Args:
        path: PNG file.
        plan: plan to draw.

    Returns:
        False if matplotlib is not installed.
    """
    try:
        pyplot = pyplot_for_files()
    except ModuleNotFoundError:
        return False
    figure, (memory, step) = pyplot.subplots(1, 2, figsize=(13, 6), width_ratios=(3, 1), layout="constrained")
    device, layout, worst = plan.device, plan.job.layout, plan.worst
    rows = {name: [value / GIB for value in values] for name, values in memory_rows(plan).items()}
    ranks = [str(item.rank) for item in plan.ranks]
    _stack(memory, ranks, {name: values for name, values in rows.items() if max(values) >= 0.005})
    peak = worst.total / GIB
    memory.annotate(
        f"{peak:.1f}", (worst.rank, peak), ha="center", va="bottom", fontsize=9, zorder=5, bbox=_BOX
    )
    limit = memory.axhline(
        device.memory, color="red", linestyle="--", label=f"{device.memory:g} GiB reported"
    )
    lines = [limit]
    if device.reserve:
        free = device.memory - device.reserve
        label = f"{free:g} GiB without the reserve"
        lines.append(memory.axhline(free, color="red", linestyle=":", label=label))
    memory.set(title=f"{layout} on {layout.devices} {device.name}: {plan.verdict}", ylabel="GiB")
    memory.set_xlabel("pipeline rank")
    _legend(memory, lines)
    ordered = sorted(plan.time.parts.items(), key=lambda part: -part[1])
    seen = {name: [value] for name, value in ordered if value >= 1e-3 * plan.time.total}
    _stack(step, ["step"], seen)
    share = f"{plan.utilisation():.0%} of the devices' FLOPs"
    step.set(title=f"{plan.time.total:.2f} s\n{share}", ylabel="s")
    _legend(step, [])
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
    return True


def _stack(axes: Any, names: Sequence[str], rows: Mapping[str, Sequence[float]]) -> None:
    below = [0.0] * len(names)
    for name, values in rows.items():
        axes.bar(names, values, bottom=below, label=name, color=colour(name), width=0.8)
        below = [low + value for low, value in zip(below, values, strict=True)]


def _legend(axes: Any, lines: Sequence[Any]) -> None:
    """Add a legend: limits first, then parts from the top of the stack to its bottom."""
    bars = list(axes.containers)[::-1]
    axes.legend(handles=[*lines, *bars], fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
