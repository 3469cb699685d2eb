"""Report of expert load per step, ``expert_load.jsonl``: number of tokens routed to each expert.

``--moe-router-load-report`` writes one record per step, and :func:`mindspeed_dsa.runs.metrics.read` reads it:

* ``layers``: one entry per MoE layer, with its ``layer`` number in the whole model, from 1, and its pipeline
  ``stage``, from 0. ``experts`` has the token count of each expert. ``ranks`` has the token count of each
  expert parallel rank, one list per replica of the experts. ``microbatches`` is their number in each replica.
  ``expert_imbalance`` and ``rank_imbalance`` are maximum over mean.
* ``stages``: one entry per pipeline stage, with ``tokens``, summed over its MoE layers, and ``imbalance``.
  This is the sum of the layers' maximum rank loads divided by the sum of their mean rank loads, because ranks
  wait for each other in every layer.

A token counts once for each expert that it is sent to.
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
    """Token counts of one step in one MoE layer.

    Attributes:
        layer: layer number, from 1.
        stage: pipeline stage, from 0.
        experts: token count of each expert.
        ranks: token counts of the expert parallel ranks, one list per replica of the experts.
        microbatches: number of microbatches of each replica.
    """

    layer: int
    stage: int
    experts: Sequence[int]
    ranks: Sequence[Sequence[int]]
    microbatches: int = 1


def imbalance(loads: Sequence[float]) -> float:
    """Return the maximum load divided by the mean load, or 1 if all loads are 0."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def record(step: int, layers: Sequence[LayerLoad]) -> Record:
    """Return the report's record of one training step."""
    return {
        "step": step,
        "layers": [
            {
                "layer": layer.layer,
                "stage": layer.stage,
                "expert_imbalance": round(imbalance(layer.experts), 4),
                "rank_imbalance": round(imbalance(_flat(layer.ranks)), 4),
                "experts": list(layer.experts),
                "ranks": [list(replica) for replica in layer.ranks],
                "microbatches": layer.microbatches,
            }
            for layer in layers
        ],
        "stages": [
            _stage(stage, [layer for layer in layers if layer.stage == stage])
            for stage in sorted({layer.stage for layer in layers})
        ],
    }


def _stage(stage: int, layers: Sequence[LayerLoad]) -> dict[str, Any]:
    ranks = [_flat(layer.ranks) for layer in layers]
    tokens = sum(map(sum, ranks))
    # Ranks wait in every layer, so maxima add up: loads [3, 1] and [1, 3] give (3 + 3) / (2 + 2) = 1.5.
    waiting = sum(max(loads) for loads in ranks)
    means = sum(sum(loads) / len(loads) for loads in ranks)
    return {"stage": stage, "tokens": tokens, "imbalance": round(waiting / means, 4) if means else 1.0}


def _flat(ranks: Sequence[Sequence[int]]) -> list[int]:
    return [load for replica in ranks for load in replica]


def read(path: Path) -> list[Record]:
    """Read a report, ordered by step.

    Args:
        path: file, or folder that was passed to ``--moe-router-load-report``.

    Raises:
        RunError: the file does not exist or is not a report.
    """
    file = path / FILE if path.is_dir() else path
    with _explained(file):
        records = metrics.read(file)
        if not records:
            raise ValueError("it is empty")
        _check_all(records)
    return records


def recent(path: Path, count: int) -> tuple[list[Record], int]:
    """Read the last records of a report, from the end of the file.

    Args:
        path: file or folder, as in :func:`read`.
        count: maximum number of records.

    Returns:
        Records ordered by step, and the number of damaged lines that were skipped.

    Raises:
        RunError: the file does not exist or is not a report.
    """
    file = path / FILE if path.is_dir() else path
    with _explained(file):
        records, broken = metrics.latest(file, count)
        if broken and not records:
            raise ValueError(f"none of its {broken} lines is a record of a step")
        _check_all(records)
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


def _check_all(records: Sequence[Record]) -> None:
    for step in records:
        if not step["layers"]:
            raise ValueError(f"step {step['step']} has no layers with experts")
        for layer in step["layers"]:
            _check(layer)


def _check(layer: Mapping[str, Any]) -> None:
    experts = layer["experts"]
    if not (isinstance(layer["layer"], int) and experts and all(isinstance(n, int) for n in experts)):
        raise ValueError("a layer lacks the tokens of its experts")
    ranks = layer["ranks"]
    if not ranks or len({len(replica) for replica in ranks}) != 1 or sum(_flat(ranks)) != sum(experts):
        raise ValueError(
            f"layer {layer['layer']} has {sum(experts)} tokens by expert and {sum(_flat(ranks))} by rank"
        )


def totals(records: Sequence[Record]) -> dict[int, list[int]]:
    """Return a dict from layer number to token counts per expert, summed over all steps.

    Raises:
        RunError: the number of experts changes, so the records come from several models.
    """
    sums: dict[int, list[int]] = {}
    for entry in records:
        for layer in entry["layers"]:
            before = sums.setdefault(layer["layer"], [0] * len(layer["experts"]))
            if len(before) != len(layer["experts"]):
                raise RunError(
                    f"layer {layer['layer']} has {len(layer['experts'])} experts in step {entry['step']} and "
                    f"{len(before)} before; the report is of several models, use one folder for each"
                )
            sums[layer["layer"]] = [a + b for a, b in zip(before, layer["experts"], strict=True)]
    return dict(sorted(sums.items()))


def rank_imbalances(records: Sequence[Record], ranks: int) -> dict[int, float]:
    """Return a dict from layer number to the imbalance over all steps on expert parallel ranks.

    Ranks wait for each other in every step, so maxima and means are summed over the steps. If the records
    have another number of ranks, experts are divided over ``ranks`` in the order of their numbers.

    Args:
        records: records of one model, in which the number of experts is a multiple of ``ranks``.
        ranks: expert parallel size.
    """
    sums: dict[int, tuple[float, float]] = {}
    for each in records:
        for layer in each["layers"]:
            loads = _flat(layer["ranks"])
            if len(layer["ranks"][0]) != ranks:
                held = len(layer["experts"]) // ranks
                loads = [
                    sum(layer["experts"][first : first + held]) for first in range(0, ranks * held, held)
                ]
            most, mean = sums.get(layer["layer"], (0.0, 0.0))
            sums[layer["layer"]] = most + max(loads), mean + sum(loads) / len(loads)
    return {layer: most / mean if mean else 1.0 for layer, (most, mean) in sorted(sums.items())}


def draw(path: Path, records: Sequence[Record]) -> None:
    """Draw heat maps with matplotlib: imbalance by layer and step, and each expert's share of its layer.

    Args:
        path: picture file.
        records: records of a report.

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
        # About seven ticks.
        shown = sorted({round(i * (len(steps) - 1) / 6) for i in range(7)})
        row.set_xticks(shown, [str(steps[position]) for position in shown])
    _map(figure, axes[2], shares, list(counts), "tokens of an expert over the mean, all steps")
    axes[2].set_xlabel("expert")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def imbalances(records: Sequence[Record], key: str) -> list[list[float]]:
    """Return the layers' values of ``key`` as ``[layers, steps]``; NaN where a step lacks the layer."""
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
