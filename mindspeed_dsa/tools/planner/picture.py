"""A plan as a picture: memory of each pipeline rank by part, and a step's time by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_dsa.tools.planner.memory import GIB
from mindspeed_dsa.tools.planner.plan import Plan
from mindspeed_dsa.tools.planner.report import memory_rows


def draw(path: Path, plan: Plan) -> bool:
    """Stacked bars with the device's limit, and one bar of a step.

    Args:
        path: PNG file.
        plan: made.

    Returns:
        False where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, step) = pyplot.subplots(1, 2, figsize=(13, 6), width_ratios=(3, 1), layout="constrained")
    colours = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    ranks = [str(each.rank) for each in plan.ranks]
    rows = {name: [value / GIB for value in values] for name, values in memory_rows(plan).items()}
    _stack(memory, ranks, {name: values for name, values in rows.items() if any(values)}, colours)
    memory.axhline(plan.device.memory, color="red", linestyle="--", label=f"{plan.device.name}'s memory")
    memory.set(title=f"{plan.job.layout} on {plan.job.layout.devices} {plan.device.name}", ylabel="GiB")
    memory.set_xlabel("pipeline rank")
    memory.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ordered = sorted(plan.time.parts.items(), key=lambda each: -each[1])
    _stack(step, ["step"], {name: [value] for name, value in ordered}, colours)
    step.set(title=f"{plan.time.total:.2f} s, {plan.utilisation():.0%} of the devices", ylabel="s")
    step.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
    return True


def _stack(axes: Any, names: list[str], rows: dict[str, list[float]], colours: Any) -> None:
    below = [0.0] * len(names)
    for index, (name, values) in enumerate(rows.items()):
        axes.bar(names, values, bottom=below, label=name, color=colours[index % len(colours)], width=0.8)
        below = [low + value for low, value in zip(below, values, strict=True)]
