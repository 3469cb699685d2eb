"""Grouped experts train the same as Megatron's sequential experts."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.runs import expert_placement
from mindspeed_dsa.runs.expert_placement import Placement
from tests.features.moe.grouped_experts.beside_sequential import ACTIVATIONS
from tests.support.moe import assert_same

BALANCED = "tests.features.moe.balanced_experts.popular_experts"
CASES = "tests.features.moe.grouped_experts.beside_sequential"
COUNTS = {"uneven": (5, 0, 9, 2), "one token": (0, 0, 1, 0), "no tokens": (0, 0, 0, 0), "one expert": (7,)}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        pytest.param(2, {"ep": 2}, marks=pytest.mark.full),
        (4, {"ep": 2, "tp": 2}),
        pytest.param(2, {"tp": 2, "etp": 2}, marks=pytest.mark.full),
    ],
    ids=["EP1", "EP2", "EP2, TP2+SP", "ETP2"],
)
def test_layers(pool, ranks, layout):
    for built in pool.run(f"{CASES}:layers", ranks, **layout):
        assert built == ("GroupedExperts", "SequentialMLP")


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
def test_rows_of_experts(pool, counts):
    pool.run(f"{CASES}:experts", 1, tokens_per_expert=counts)


@pytest.mark.parametrize("activation", list(ACTIVATIONS)[1:])
def test_what_lies_between_the_linear_layers(pool, activation):
    pool.run(f"{CASES}:experts", 1, tokens_per_expert=COUNTS["uneven"], activation=activation)


@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_layouts_in_bf16_into_main_grad(pool, layout):
    pool.run(
        f"{CASES}:experts",
        1,
        tokens_per_expert=COUNTS["uneven"],
        main_grad=torch.float32,
        params_dtype=torch.bfloat16,
        switches={"gemm_weight_layout": layout},
    )


def test_megatrons_recomputed_activation(pool):
    # The switch is needed in releases whose own checkpoint needs Transformer Engine.
    pool.run(
        f"{CASES}:experts",
        1,
        tokens_per_expert=COUNTS["uneven"],
        recompute_granularity="selective",
        recompute_modules=["moe_act"],
        switches={"recompute_modules": ["moe_act"]},
    )


@pytest.mark.parametrize("cpu_initialization", [False, True])
def test_initial_weights(pool, cpu_initialization):
    pool.run(f"{CASES}:initial_weights", 1, cpu_initialization=cpu_initialization)


@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_state_dicts(pool, layout):
    pool.run(f"{CASES}:state_dicts", 1, switches={"gemm_weight_layout": layout})


def test_hot_experts_travel(pool):
    """Single experts of a stack are lent to other ranks, and their gradients return into the stack."""
    from tests.features.moe.balanced_experts.popular_experts import ALWAYS

    arguments = {"popularity": [[2.0, 1.0, 0.0, -1.0]] * 2, "ep": 2}
    stock = pool.run(f"{BALANCED}:train", 2, switches={}, **arguments)
    grouped = {"overrides": {"moe_grouped_gemm": True}, **arguments}
    ours = pool.run(f"{BALANCED}:train", 2, switches={**ALWAYS, "moe_grouped_gemm": True}, **grouped)
    for mine, theirs in zip(ours, stock, strict=True):
        assert_same(mine, theirs)
        assert any(mine["plans"])
        assert mine["sent"] > 0


def test_weight_gradients_under_the_dispatch(pool):
    """All four gradients (two microbatches, two stacks) are deferred where overlapped all-to-alls have
    room.
    """
    assert pool.run(f"{CASES}:overlapped", 2, ep=2) == [4, 4]


def test_experts_in_other_slots(pool, tmp_path):
    file, order = tmp_path / "placement.json", [3, 1, 0, 2]
    expert_placement.write(file, Placement(4, 2, {1: order}))
    held = pool.run(f"{CASES}:placed", 2, file=str(file), order=order)
    assert held == [[(3, 1), (0, 2)]] * 2
