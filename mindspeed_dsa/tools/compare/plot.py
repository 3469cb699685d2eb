"""Plots of both sides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_dsa.runs.metrics import Record
from mindspeed_dsa.runs.plot import points

_COLOURS = {"A": "tab:blue", "B": "tab:orange"}


def draw(path: Path, runs: dict[str, list[Record]]) -> bool:
    """Losses, their difference, step times and gradient norms; all repeats are drawn.

    Args:
        path: PNG file.
        runs: records by the name of the run: ``A1``, ``B1``, ...

    Returns:
        False where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axes, name, title in (
        (grid[0][0], "lm_loss", "loss (nats per token)"),
        (grid[1][0], "step_time_s", "step time (s)"),
        (grid[1][1], "grad_norm", "gradient norm"),
    ):
        for run, records in runs.items():
            label = run[0] if run[1:] == "1" else None
            axes.plot(*points(records, name), color=_COLOURS[run[0]], label=label, linewidth=1, alpha=0.8)
        axes.set(title=title, xlabel="step")
        axes.legend()
    _draw_difference(grid[0][1], runs["A1"], runs["B1"])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _draw_difference(axes: Any, a: Sequence[Record], b: Sequence[Record]) -> None:
    there = dict(zip(*points(b, "lm_loss"), strict=True))
    steps, losses = points(a, "lm_loss")
    pairs = [(step, there[step] - loss) for step, loss in zip(steps, losses, strict=True) if step in there]
    axes.axhline(0.0, color="grey", linewidth=0.5)
    axes.plot([step for step, _ in pairs], [gap for _, gap in pairs], color="black", linewidth=1)
    axes.set(title="loss of B minus loss of A", xlabel="step")
