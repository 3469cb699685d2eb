"""Losses of a run over its steps, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_dsa.runs.metrics import Record


def points(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    """Steps that have a figure, and their values."""
    found = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def draw(
    path: Path,
    records: Sequence[Record],
    heldout: Sequence[Record] = (),
    levels: Mapping[str, float] | None = None,
) -> None:
    """Draw the language model and indexer loss with matplotlib.

    Args:
        path: picture file.
        records: as ``metrics.jsonl`` holds them.
        heldout: records of evaluations, with ``heldout_loss``.
        levels: losses to compare with, as horizontal lines by name.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*points(records, "lm_loss"), label="training", linewidth=1)
    if heldout:
        axes.plot(*points(heldout, "heldout_loss"), marker="o", label="held-out")
    for name, loss in (levels or {}).items():
        axes.axhline(loss, linestyle="--", color="grey", linewidth=1, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    indexer = points(records, "indexer_loss")
    if indexer[0]:
        right = axes.twinx()
        right.plot(*indexer, color="tab:green", linewidth=0.8, alpha=0.7)
        right.set_ylabel("indexer loss", color="tab:green")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
