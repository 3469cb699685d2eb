"""Cost of unequal expert loads in a job's split, and the share of it that each remedy removes.

A layer takes the time of its fullest rank, and a step the time of the stage whose layers take longest. Both
are counted in rows, one for each copy of a token for one expert. Layers without experts count nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from mindspeed_dsa.runs import expert_load, expert_placement
from mindspeed_dsa.runs.metrics import Record
from mindspeed_dsa.tools.planner import devices
from mindspeed_dsa.tools.planner.dealing import Dealing

STEPS = 8
"""Number of last steps in which experts are moved: a plan of hundreds of experts takes a while."""
DEVICE = "h100"
"""Device whose rates decide how many experts are worth moving."""


@dataclass(frozen=True)
class LayerRows:
    """Rows of a layer's fullest rank in a step, in the mean over all steps.

    Attributes:
        stage: pipeline stage.
        today: rows as recorded.
        even: rows if all ranks had the same.
        placed: rows with the experts placed by ``--moe-expert-placement``.
        moved: rows in whose time the layer finishes with ``--balanced-moe-experts``, transfers included. None
            if the records lack the number of microbatches.
    """

    stage: int
    today: float
    even: float
    placed: float
    moved: float | None


def rows_of(records: Sequence[Record]) -> list[LayerRows]:
    """Return the layers of a report, in order."""
    loads = expert_load.totals(records)
    layers = []
    for number, totals in loads.items():
        steps = [layer for each in records for layer in each["layers"] if layer["layer"] == number]
        replicas, ranks = len(steps[-1]["ranks"]), len(steps[-1]["ranks"][0])
        order = expert_placement.balanced(totals, ranks)
        by_rank = [[load for replica in step["ranks"] for load in replica] for step in steps]
        placed = [max(expert_placement.rank_loads(step["experts"], order, ranks)) for step in steps]
        today = sum(map(max, by_rank)) / len(steps)
        layers.append(
            LayerRows(
                steps[-1]["stage"],
                today,
                sum(sum(loads) / len(loads) for loads in by_rank) / len(steps),
                # Experts stay where they are if other places are no better.
                min(today, sum(placed) / len(steps) / replicas),
                _moved(steps[-STEPS:], today),
            )
        )
    return layers


def _moved(steps: Sequence[Record], today: float) -> float | None:
    """Return the rows in whose time a layer with moved experts finishes, or None without microbatches.

    Moving follows the loads of each microbatch, so each step has a plan of its own, for its mean microbatch.

    Args:
        steps: records of the layer in some steps; each rank has the same number of tokens for an expert.
        today: rows without moving.
    """
    if not all(step.get("microbatches") for step in steps):
        return None
    # Imports torch.
    from mindspeed_dsa.features.moe.balanced_experts.planning import Costs, choose

    device, ranks = devices.device(DEVICE), len(steps[-1]["ranks"][0])
    link = device.link * device.linking if ranks <= device.node else device.network * device.networking
    # A row through a gated expert is 6 H F FLOP, its bf16 weights are 6 H F bytes: rate over rate, in rows.
    weights = device.tflops * device.matmul * 1e3 / link
    costs = Costs(row=1.0, token=0.0, weights=weights, gradients=2 * weights)
    before = after = 0.0
    for step in steps:
        count = step["microbatches"] * len(step["ranks"])
        plan = choose([[round(load / count / ranks) for load in step["experts"]]] * ranks, costs)
        before += plan.before * count
        after += plan.after * count
    return today * after / before if before else today


def lines(layers: Sequence[LayerRows]) -> list[tuple[str, ...]]:
    """Return the table of remedies: the slowest stage's rows, and the share of waits removed."""
    split = split_of(layers)
    today = _slowest(layers, [layer.today for layer in layers])
    even = sum(layer.even for layer in layers) / split.ranks
    # Layers stay where they are if other stages are no better.
    with_layout = min(today, _dealt(split, [layer.today for layer in layers]))
    moved = all(layer.moved is not None for layer in layers)
    best = [min(layer.placed, layer.placed if layer.moved is None else layer.moved) for layer in layers]
    remedies: list[tuple[str, float | None]] = [
        ("placement", _slowest(layers, [layer.placed for layer in layers])),
        ("moving", _slowest(layers, [layer.moved or 0.0 for layer in layers]) if moved else None),
        ("layout", with_layout),
        ("layout with the better of these", min(_slowest(layers, best), _dealt(split, best))),
    ]
    rows: list[tuple[str, ...]] = [("", "rows of the slowest stage", "of the waits removed")]
    waits = (today - even) / today if today else 0.0
    rows.append(("today", f"{today:,.0f}", f"{waits:.0%} of the rows are waits"))
    for name, rows_left in remedies:
        if rows_left is None:
            rows.append((name, "unknown", "the records have no microbatches; record again"))
        else:
            share = (today - rows_left) / (today - even) if today > even else 0.0
            rows.append((name, f"{rows_left:,.0f}", f"{max(0.0, share):.0%}"))
    rows.append(("all even", f"{even:,.0f}", ""))
    return rows


def _slowest(layers: Sequence[LayerRows], rows: Sequence[float]) -> float:
    sums: dict[int, float] = {}
    for layer, own in zip(layers, rows, strict=True):
        sums[layer.stage] = sums.get(layer.stage, 0.0) + own
    return max(sums.values())


def split_of(layers: Sequence[LayerRows]) -> Dealing:
    """Return the shape of the recorded pipeline, from the stages of consecutive layers."""
    visited = [stage for stage, _ in groupby(layer.stage for layer in layers)]
    ranks = max(visited) + 1
    # On 2 ranks, 0 1 0 1 is interleaved, and 0 1 0 a V whose middle stages are both on rank 1.
    peak = visited.index(ranks - 1)
    v_shaped = visited[peak:] == [*range(ranks - 1, visited[-1] - 1, -1)] and len(visited) > peak + 1
    chunks = 2 if v_shaped else max(1, round(len(visited) / len(set(visited))))
    return Dealing([layer.today for layer in layers], 0.0, 0.0, ranks, chunks, v_shaped)


def _dealt(split: Dealing, rows: Sequence[float]) -> float:
    """Return the rows of the slowest rank if layers are dealt anew; as many stages as layers at most."""
    chunks = split.chunks if len(rows) >= split.ranks * split.chunks else 1
    dealing = Dealing(rows, 0.0, 0.0, split.ranks, chunks, split.v_shaped and chunks > 1)
    sizes = dealing.best()
    return max(dealing.ranks_of(sizes)) if sizes else sum(rows)
