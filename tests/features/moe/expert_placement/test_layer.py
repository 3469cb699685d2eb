"""A layer computes the same wherever its experts are, bit for bit."""

from __future__ import annotations

import pytest

from mindspeed_dsa.runs import expert_placement
from mindspeed_dsa.runs.expert_placement import Placement
from tests.features.moe.expert_placement.cases import same

ORDER = [5, 0, 7, 2, 1, 6, 3, 4]


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, {}),
        pytest.param(4, {}, marks=pytest.mark.full),
        pytest.param(2, {"dispatcher": "allgather"}, marks=pytest.mark.full),
        pytest.param(2, {"tp": 2}, marks=pytest.mark.full),
    ],
    ids=("EP2", "EP4", "EP2, allgather", "TP2+SP, EP2"),
)
def test_outputs_losses_and_gradients_are_those_of_experts_in_order(pool, tmp_path, ranks, arguments):
    """With auxiliary losses and the expert bias, whose counts go by the expert's number."""
    file = tmp_path / "placement.json"
    expert_placement.write(file, Placement(8, ranks, {1: ORDER}))
    case = "tests.features.moe.expert_placement.cases:train"
    stock = pool.run(case, ranks, order=None, file="", **arguments)
    placed = pool.run(case, ranks, order=ORDER, file=str(file), **arguments)
    for mine, theirs in zip(placed, stock, strict=True):
        for what in ("outputs", "inputs", "router", "bias", "experts"):
            assert same(mine[what], theirs[what]), what
    # Each expert computed the same tokens, on the rank that the order says.
    tokens = {number: n for part in stock[0]["computed"] for number, n in part.items()}
    room = 8 // ranks
    expected = [{e: tokens[e] for e in ORDER[r * room : (r + 1) * room]} for r in range(ranks)]
    assert placed[0]["computed"] == expected != stock[0]["computed"]
