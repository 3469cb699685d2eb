"""Which expert parallel rank holds which expert: made from recorded loads, and a file to keep it in.

An order lists a layer's experts by slot; each rank has an equal number of slots, rank after rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dsa.runs.expert_load import imbalance
from mindspeed_dsa.runs.files import RunError, write_atomically


@dataclass(frozen=True)
class Placement:
    """Orders of a model's MoE layers.

    Attributes:
        experts: number of experts of a layer.
        ranks: expert parallel size.
        orders: by layer number, from 1: its experts by slot.
    """

    experts: int
    ranks: int
    orders: Mapping[int, Sequence[int]]


def balanced(loads: Sequence[int], ranks: int) -> list[int]:
    """An order that gives every rank the same number of experts and nearly the same load.

    Experts go to the least loaded rank that has room, the largest first; then the most loaded rank swaps
    experts with others as long as that makes it less loaded than it was. The same loads always give the same
    order, and where experts are as well balanced in their own slots, they stay there.

    Args:
        loads: tokens by expert; their number is a multiple of ``ranks``.
        ranks: expert parallel size.
    """
    room = len(loads) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert)):
        rank = min((rank for rank in range(ranks) if len(held[rank]) < room), key=lambda rank: sums[rank])
        held[rank].append(expert)
        sums[rank] += loads[expert]
    while _swap(loads, held, sums):
        pass
    order = [expert for experts in held for expert in sorted(experts)]
    unmoved = list(range(len(loads)))
    return order if max(sums) < max(rank_loads(loads, unmoved, ranks)) else unmoved


def _swap(loads: Sequence[int], held: list[list[int]], sums: list[int]) -> bool:
    """The swap that relieves the most loaded rank most; whether there was one."""
    most = max(range(len(sums)), key=lambda rank: (sums[rank], -rank))
    best: tuple[int, int, int, int] | None = None
    for rank in range(len(sums)):
        for mine, expert in enumerate(held[most]):
            for theirs, other in enumerate(held[rank]):
                moved = loads[expert] - loads[other]
                larger = max(sums[most] - moved, sums[rank] + moved)
                if larger < (sums[most] if best is None else best[0]):
                    best = larger, rank, mine, theirs
    if best is None:
        return False
    _, rank, mine, theirs = best
    moved = loads[held[most][mine]] - loads[held[rank][theirs]]
    held[most][mine], held[rank][theirs] = held[rank][theirs], held[most][mine]
    sums[most] -= moved
    sums[rank] += moved
    return True


def rank_loads(loads: Sequence[int], order: Sequence[int], ranks: int) -> list[int]:
    """Tokens by rank."""
    room = len(order) // ranks
    return [sum(loads[expert] for expert in order[rank * room : (rank + 1) * room]) for rank in range(ranks)]


def improvement(loads: Sequence[int], order: Sequence[int], ranks: int) -> tuple[float, float]:
    """The most loaded rank over the mean, with every expert in its own slot and in this order."""
    unmoved = range(len(loads))
    return (
        imbalance(rank_loads(loads, list(unmoved), ranks)),
        imbalance(rank_loads(loads, order, ranks)),
    )


def place(loads: Mapping[int, Sequence[int]], ranks: int) -> Placement:
    """:func:`balanced` orders of all layers.

    Args:
        loads: tokens by layer and expert.
        ranks: expert parallel size.

    Raises:
        RunError: the ranks cannot hold equal numbers of experts.
    """
    counts = {len(experts) for experts in loads.values()}
    (experts,) = counts if len(counts) == 1 else (0,)
    if not experts or ranks < 1 or experts % ranks:
        raise RunError(
            f"{' or '.join(map(str, sorted(counts)))} experts cannot be spread evenly over "
            f"--expert-model-parallel-size {ranks}"
        )
    return Placement(experts, ranks, {layer: balanced(each, ranks) for layer, each in loads.items()})


def write(path: Path, placement: Placement) -> None:
    """Write the file that ``--moe-expert-placement`` takes."""
    content = {
        "num_experts": placement.experts,
        "expert_model_parallel_size": placement.ranks,
        "layers": {str(layer): list(order) for layer, order in placement.orders.items()},
    }
    write_atomically(path, json.dumps(content) + "\n")


def read(path: Path) -> Placement:
    """The counterpart.

    Raises:
        RunError: there is no such file, or it holds something else.
    """
    write_one = (
        f"write one with: python -m mindspeed_dsa experts REPORT --placement {path} "
        "--expert-model-parallel-size N"
    )
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise RunError(f"there is no file {path}; {write_one}") from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        content = json.loads(text)
        orders = {int(layer): [int(expert) for expert in order] for layer, order in content["layers"].items()}
        placement = Placement(int(content["num_experts"]), int(content["expert_model_parallel_size"]), orders)
        every = list(range(placement.experts))
        wrong = [layer for layer, order in orders.items() if sorted(order) != every]
        if wrong or not orders:
            raise ValueError(f"layers {wrong} do not hold each of {placement.experts} experts once")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is not a placement of experts ({error}); {write_one}") from error
    return placement
