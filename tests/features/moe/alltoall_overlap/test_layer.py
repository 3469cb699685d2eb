"""A MoE layer with overlapped all-to-alls computes the same as the stock layer."""

from __future__ import annotations

import pytest

from tests.support import moe

CASES = "tests.features.moe.alltoall_overlap.overlapped_layer"
CAPACITY = {"moe_expert_capacity_factor": 1.0}
RUNS = {
    "several microbatches": {"rows": (6, 5, 7)},
    **moe.LAYERS,
    "capacity": CAPACITY,
    "padded to capacity": {**CAPACITY, "moe_pad_expert_input_to_capacity": True},
}
OF_LAYOUTS = {name: RUNS[name] for name in ("several microbatches", "gate", "padded to capacity")}


def check(found, runs):
    for rank in found:
        for name in runs:
            assert len(rank[name]["ours"]["outputs"]) == len(runs[name].get("rows", (6, 6))), name
            moe.assert_as_stock(name, runs[name], rank[name], transfers=3, rtol_bf16=1e-2)


def test_two_ranks(pool):
    check(pool.run(f"{CASES}:beside_stock", 2, runs=RUNS), RUNS)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "ep": 2}, {"tp": 2, "ep": 2, "etp": 2}, {"ep": 4}],
    ids=["TP2+SP, EP2", "TP2+SP, EP2, ETP2", "EP4"],
)
def test_layouts(pool, layout):
    ranks = max(layout["ep"] * layout.get("etp", 1), layout.get("tp", 1))
    check(pool.run(f"{CASES}:beside_stock", ranks, runs=OF_LAYOUTS, **layout), OF_LAYOUTS)


def test_order_of_events(pool):
    """Each transfer runs at the same time as expected computation, in forward and in backward."""
    for events in pool.run(f"{CASES}:order", 2):
        assert events["forward"] == [
            *("launch", "launch", "shared fc1", "wait", "wait", "expert", "launch", "shared fc2", "wait"),
        ]
        assert events["backward"] == [
            *("launch", "shared fc2 dW", "shared fc1 dW", "wait"),
            *("launch", "launch", *["expert dW"] * 4, "wait", "wait"),
        ]


def test_order_of_experts_without_ports(pool):
    """Without expert weight gradients, only the shared expert's first half hides the second transfer."""
    for found in pool.run(f"{CASES}:order", 2, frozen=True):
        assert found["backward"] == [
            *("launch", "shared fc2 dW", "wait", "launch", "launch", "shared fc1 dW", "wait", "wait"),
        ]


def test_order_without_shared_expert(pool):
    """Without a shared expert, only weight gradients hide a transfer, namely the one after them."""
    for found in pool.run(f"{CASES}:order", 2, moe_shared_expert_intermediate_size=None):
        assert found["forward"] == ["launch", "launch", "wait", "wait", "expert", "launch", "wait"]
        assert found["backward"] == [
            *("launch", "wait", "launch", "launch", *["expert dW"] * 4, "wait", "wait"),
        ]


@pytest.mark.parametrize(
    ("ranks", "distributed"),
    [(2, False), pytest.param(4, True, marks=pytest.mark.full)],
    ids=["DP2", "DP4, distributed optimizer"],
)
def test_gradients_are_ready_once(pool, ranks, distributed):
    """With overlapped reduction, every parameter reports its gradient as often as in stock."""
    for found in pool.run(f"{CASES}:overlapped_reduction", ranks, ep=2, distributed=distributed):
        ours, theirs = found["ours"], found["theirs"]
        assert ours["golden"] == theirs["golden"]
        assert set(ours["golden"].values()) == {1}
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        for name, gradient in theirs["gradients"].items():
            difference = (ours["gradients"][name] - gradient).abs().max()
            assert difference <= 1e-5 * gradient.abs().max(), name
