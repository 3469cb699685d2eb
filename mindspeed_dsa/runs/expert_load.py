"""How many tokens a run's routers sent to each expert, by step: ``expert_load.jsonl``.

``--moe-router-load-report`` writes one record per step, which :func:`mindspeed_dsa.runs.metrics.read` reads:

* ``layers``: for each MoE layer its ``layer`` number, from 1 through the whole model, and its pipeline
  ``stage``, from 0; ``experts``, the tokens that each expert got; ``ranks``, those that each expert parallel
  rank got, one list per replica of the experts; ``expert_imbalance`` and ``rank_imbalance``, the most loaded
  one over the mean;
* ``stages``: for each pipeline stage its number of ``tokens`` over all of its MoE layers, and ``imbalance``:
  the most loaded ranks of its layers over their means, both added up over the layers, as ranks wait for one
  another in every layer.

A token counts once for each expert that it was sent to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_dsa.runs import metrics
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.runs.metrics import Record, pyplot_for

FILE = "expert_load.jsonl"


class LayerLoad(NamedTuple):
    """Tokens of one step in one MoE layer.

    Attributes:
        layer: its number, from 1.
        stage: its pipeline stage, from 0.
        experts: tokens by expert.
        ranks: tokens by replica of the experts and by expert parallel rank.
    """

    layer: int
    stage: int
    experts: Sequence[int]
    ranks: Sequence[Sequence[int]]


def imbalance(loads: Sequence[float]) -> float:
    """The largest over the mean; 1 where nothing was done at all."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def record(step: int, layers: Sequence[LayerLoad]) -> Record:
    """One step, as the file has it."""
    return {
        "step": step,
        "layers": [
            {
                "layer": each.layer,
                "stage": each.stage,
                "expert_imbalance": round(imbalance(each.experts), 4),
                "rank_imbalance": round(imbalance(_flat(each.ranks)), 4),
                "experts": list(each.experts),
                "ranks": [list(replica) for replica in each.ranks],
            }
            for each in layers
        ],
        "stages": [
            _stage(stage, [each for each in layers if each.stage == stage])
            for stage in sorted({each.stage for each in layers})
        ],
    }


def _stage(stage: int, layers: Sequence[LayerLoad]) -> dict[str, Any]:
    ranks = [_flat(each.ranks) for each in layers]
    tokens = sum(map(sum, ranks))
    waiting = sum(max(loads) for loads in ranks)
    means = sum(sum(loads) / len(loads) for loads in ranks)
    return {"stage": stage, "tokens": tokens, "imbalance": round(waiting / means, 4) if means else 1.0}


def _flat(ranks: Sequence[Sequence[int]]) -> list[int]:
    return [load for replica in ranks for load in replica]


def read(path: Path) -> list[Record]:
    """Records of a report, by step.

    Args:
        path: the file, or the folder that was given to ``--moe-router-load-report``.

    Raises:
        RunError: there is no such file, or it holds something else.
    """
    file = path / FILE if path.is_dir() else path
    with _explained(file):
        records = metrics.read(file)
        if not records:
            raise ValueError("it is empty")
        for each in records:
            for layer in each["layers"]:
                _check(layer)
    return records


def recent(path: Path, count: int) -> tuple[list[Record], int]:
    """The last records of a report, without reading what is before them.

    Args:
        path: as for :func:`read`.
        count: how many at most; fewer, or none, if there are not so many.

    Returns:
        The records by step; and how many damaged lines among them were left out.

    Raises:
        RunError: there is no such file, or it holds something else.
    """
    file = path / FILE if path.is_dir() else path
    with _explained(file):
        records, broken = metrics.latest(file, count)
        if broken and not records:
            raise ValueError(f"none of its {broken} lines is a record of a step")
        for each in records:
            for layer in each["layers"]:
                _check(layer)
    return records, broken


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{file} is not a report of --moe-router-load-report ({error}); name the folder that was given "
            f"to that flag, or the {FILE} in it"
        ) from error


def _check(layer: Mapping[str, Any]) -> None:
    experts = layer["experts"]
    if not (isinstance(layer["layer"], int) and experts and all(isinstance(n, int) for n in experts)):
        raise ValueError("a layer lacks the tokens of its experts")


def totals(records: Sequence[Record]) -> dict[int, list[int]]:
    """Tokens by layer and expert, over all steps.

    Raises:
        RunError: the number of experts changed: the records are of several models.
    """
    found: dict[int, list[int]] = {}
    for each in records:
        for layer in each["layers"]:
            before = found.setdefault(layer["layer"], [0] * len(layer["experts"]))
            if len(before) != len(layer["experts"]):
                raise RunError(
                    f"layer {layer['layer']} has {len(layer['experts'])} experts in step {each['step']} and "
                    f"{len(before)} before; the report is of several models, use one folder for each"
                )
            found[layer["layer"]] = [a + b for a, b in zip(before, layer["experts"], strict=True)]
    return dict(sorted(found.items()))


def draw(path: Path, records: Sequence[Record]) -> None:
    """Draw heat maps with matplotlib: imbalances over layers and steps, and each expert's share of a layer.

    Args:
        path: picture file.
        records: of a report.

    Raises:
        RunError: matplotlib is missing.
    """
    pyplot = pyplot_for(path)
    counts = totals(records)
    shares = [
        [tokens * len(experts) / max(sum(experts), 1) for tokens in experts] for experts in counts.values()
    ]
    figure, axes = pyplot.subplots(3, figsize=(9, 9), layout="constrained")
    steps = [each["step"] for each in records]
    for row, key, title in (
        (axes[0], "rank_imbalance", "most loaded rank over the mean"),
        (axes[1], "expert_imbalance", "most loaded expert over the mean"),
    ):
        _map(figure, row, imbalances(records, key), list(counts), title)
        row.set_xlabel("step")
        shown = sorted({round(i * (len(steps) - 1) / 6) for i in range(7)})
        row.set_xticks(shown, [str(steps[position]) for position in shown])
    _map(figure, axes[2], shares, list(counts), "tokens of an expert over the mean, all steps")
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
