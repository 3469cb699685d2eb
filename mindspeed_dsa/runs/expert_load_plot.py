"""The load of experts as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_dsa.runs import expert_load
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.runs.metrics import Record


def draw(path: Path, records: Sequence[Record]) -> None:
    """Draw heat maps with matplotlib: imbalances over layers and steps, and each expert's share of a layer.

    Args:
        path: picture file.
        records: of a report.

    Raises:
        RunError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise RunError(
            f"{path} cannot be drawn: matplotlib is missing; pip install 'mindspeed_dsa[viz]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    totals = expert_load.totals(records)
    shares = [
        [tokens * len(experts) / max(sum(experts), 1) for tokens in experts] for experts in totals.values()
    ]
    figure, axes = pyplot.subplots(3, figsize=(9, 9), layout="constrained")
    steps = [each["step"] for each in records]
    for row, key, title in (
        (axes[0], "rank_imbalance", "most loaded rank over the mean"),
        (axes[1], "expert_imbalance", "most loaded expert over the mean"),
    ):
        _map(figure, row, imbalances(records, key), list(totals), title)
        row.set_xlabel("step")
        shown = sorted({round(i * (len(steps) - 1) / 6) for i in range(7)})
        row.set_xticks(shown, [str(steps[position]) for position in shown])
    _map(figure, axes[2], shares, list(totals), "tokens of an expert over the mean, all steps")
    axes[2].set_xlabel("expert")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def imbalances(records: Sequence[Record], key: str) -> list[list[float]]:
    """``[layers, steps]``: the figure ``key`` of every layer; NaN where a step lacks a layer."""
    by_step = [{layer["layer"]: layer[key] for layer in each["layers"]} for each in records]
    layers = sorted({layer for each in by_step for layer in each})
    return [[each.get(layer, float("nan")) for each in by_step] for layer in layers]


def _map(
    figure: Any, axes: Any, values: Sequence[Sequence[float]], layers: Sequence[int], title: str
) -> None:
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis")
    axes.set(title=title, ylabel="layer")
    shown = range(0, len(layers), max(1, len(layers) // 8))
    axes.set_yticks(list(shown), [str(layers[position]) for position in shown])
    figure.colorbar(image, ax=axes)
