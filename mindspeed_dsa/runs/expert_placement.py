"""Placement of experts on expert parallel ranks: computed from recorded loads, and stored in a file.

The order of a layer lists the expert in each slot. Ranks have equal numbers of consecutive slots.
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
    """Order of the experts in each MoE layer of a model.

    Attributes:
        experts: number of experts per layer.
        ranks: expert parallel size.
        orders: dict from layer number (from 1) to the expert in each slot.
    """

    experts: int
    ranks: int
    orders: Mapping[int, Sequence[int]]


def balanced(loads: Sequence[int], ranks: int) -> list[int]:
    """Return an order with the same number of experts and nearly the same load on every rank.

    The result is deterministic, and experts keep their slots unless the new order is better.

    Args:
        loads: token count of each expert; the number of experts must be a multiple of ``ranks``.
        ranks: expert parallel size.
    """
    # Greedy: experts in descending load go to the least loaded rank with a free slot.
    room = len(loads) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert)):
        rank = min((rank for rank in range(ranks) if len(held[rank]) < room), key=lambda rank: sums[rank])
        held[rank].append(expert)
        sums[rank] += loads[expert]
    # Then the most loaded rank swaps experts as long as that lowers the maximum of the two ranks.
    while _swap(loads, held, sums):
        pass
    order = [expert for experts in held for expert in sorted(experts)]
    unmoved = list(range(len(loads)))
    # Moving experts is not worth it without a gain.
    return order if max(sums) < max(rank_loads(loads, unmoved, ranks)) else unmoved


def _swap(loads: Sequence[int], held: list[list[int]], sums: list[int]) -> bool:
    """Swap the pair of experts that best relieves the most loaded rank; return whether there was one."""
    most = max(range(len(sums)), key=lambda rank: (sums[rank], -rank))  # ties: the lower rank
    best: tuple[int, int, int, int] | None = None
    for rank in range(len(sums)):
        for mine, expert in enumerate(held[most]):
            for theirs, other in enumerate(held[rank]):
                # Loads 10 and 4: swapping experts of 5 and 3 moves 2, and the larger of 8 and 6 is 8.
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
    """Return the token count of each rank for an order."""
    room = len(order) // ranks
    return [sum(loads[expert] for expert in order[rank * room : (rank + 1) * room]) for rank in range(ranks)]


def improvement(loads: Sequence[int], order: Sequence[int], ranks: int) -> tuple[float, float]:
    """Return the rank imbalance (maximum over mean) of the default order, and of ``order``."""
    unmoved = range(len(loads))
    return (
        imbalance(rank_loads(loads, list(unmoved), ranks)),
        imbalance(rank_loads(loads, order, ranks)),
    )


def place(loads: Mapping[int, Sequence[int]], ranks: int) -> Placement:
    """Return :func:`balanced` orders for all layers.

    Args:
        loads: dict from layer number to token count of each expert.
        ranks: expert parallel size.

    Raises:
        RunError: the experts cannot be distributed evenly.
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
    """Write the file for ``--moe-expert-placement``."""
    content = {
        "num_experts": placement.experts,
        "expert_model_parallel_size": placement.ranks,
        "layers": {str(layer): list(order) for layer, order in placement.orders.items()},
    }
    write_atomically(path, json.dumps(content) + "\n")


def read(path: Path) -> Placement:
    """Read a file written by :func:`write`.

    Raises:
        RunError: the file does not exist or is not a placement.
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
