"""A MoE layer that splits its tokens into halves computes the same as the stock layer."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from mindspeed_dsa.features.moe.batch_overlap import choice
from tests.features.moe.batch_overlap.layer_in_halves import ALWAYS, MEASURED
from tests.support import moe
from tests.support.stand_in import measures

CASES = "tests.features.moe.batch_overlap.layer_in_halves"
OVERLAP = "tests.features.moe.alltoall_overlap.overlapped_layer"
OVERLAPPED = {"moe_alltoall_overlap_comm": True}
RUNS = {
    "several microbatches, odd tokens": {"rows": (7, 5, 6)},
    **moe.LAYERS,
    "dropped tokens": {"moe_expert_capacity_factor": 0.5},
}
OF_LAYOUTS = {name: RUNS[name] for name in ("several microbatches, odd tokens", "gate", "dropped tokens")}


def check(found, runs):
    for rank in found:
        for name in runs:
            moe.assert_as_stock(name, runs[name], rank[name], transfers=6, rtol_bf16=2e-2)


def test_two_ranks(pool):
    check(pool.run(f"{OVERLAP}:beside_stock", 2, runs=RUNS, switch=ALWAYS), RUNS)


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"tp": 2, "ep": 2}, {"ep": 4}], ids=["TP2+SP, EP2", "EP4"])
def test_layouts(pool, layout):
    found = pool.run(f"{OVERLAP}:beside_stock", layout["ep"], runs=OF_LAYOUTS, switch=ALWAYS, **layout)
    check(found, OF_LAYOUTS)


def test_order_of_events(pool):
    """Each half's transfer runs at the same time as expected computation, in forward and in backward."""
    for events in pool.run(f"{OVERLAP}:order", 2, switch=ALWAYS):
        assert events["forward"] == [
            *("launch", "launch", "shared fc1", "wait", "wait"),  # dispatch 0
            *("launch", "launch", "expert"),  # dispatch 1, experts 0
            *("launch", "wait", "wait", "expert", "wait"),  # combine 0, experts 1
            *("launch", "shared fc2", "wait"),  # combine 1
        ]
        assert events["backward"] == [
            *("launch", "shared fc2 dW", "shared fc1 dW", "wait"),  # combine 1
            *("launch", "launch", "launch", "wait"),  # combine 0 during experts 1, then dispatch 1
            *("wait", "wait", "launch", "launch"),  # experts 0, dispatch 0
            *[*["expert dW"] * 4, "wait", "wait"],
        ]


def test_order_where_experts_do_not_learn(pool):
    """With frozen experts, only the shared expert's first half hides the first dispatch."""
    for found in pool.run(f"{OVERLAP}:order", 2, switch=ALWAYS, frozen=True):
        assert found["backward"] == [
            *("launch", "shared fc2 dW", "wait", "launch", "launch", "launch", "wait", "wait", "wait"),
            *("launch", "launch", "shared fc1 dW", "wait", "wait"),
        ]


@pytest.mark.parametrize(
    ("kind", "coeff"),
    [
        pytest.param("aux_loss", 0.5, marks=pytest.mark.full),
        (["seq_aux_loss", "global_aux_loss"], [0.5, 0.25]),
    ],
    ids=["aux_loss", "seq and global"],
)
def test_load_balancing_is_of_the_whole_microbatch(pool, kind, coeff):
    for found in pool.run(f"{CASES}:balancing", 2, kind=kind, coeff=coeff):
        ours, theirs = found["ours"], found["theirs"]
        assert ours["losses"].keys() == theirs["losses"].keys() >= {"z_loss"}
        for name, values in theirs["losses"].items():
            assert values.any()
            assert torch.equal(ours["losses"][name], values), name
        moe.assert_same(ours, theirs)


@measures
@pytest.mark.parametrize(
    ("beside", "launched"),
    [({}, 0), pytest.param(OVERLAPPED, 2 * 6, marks=pytest.mark.full)],
    ids=["stock", "overlap of the whole"],
)
def test_measured_once_for_each_size_and_agreed_upon(pool, beside, launched):
    """Ranks with different measurements make the same choice, and a measurement leaves no trace."""
    ranks = pool.run(f"{CASES}:measured", 2, switch={**MEASURED, **beside})
    for rank in ranks:
        ours, theirs = rank["ours"], rank["theirs"]
        for mine, stock in zip(ours["runs"], theirs["runs"], strict=True):
            moe.assert_same(mine, stock)
        first, same_size, other = ours["launched"]
        # One rank is slower with halves, so both ranks use the unsplit layer, and do not measure again.
        assert same_size == launched
        assert ours["ways"][1] == 0 < ours["ways"][0] == ours["ways"][2]
        assert other - first == 2 * 2 * 6 - launched  # two microbatches, forward and backward
    whole, cut = (line for line in ranks[0]["ours"]["lines"] if "forward of a MoELayer takes" in line)
    assert "tokens stay whole, because halves cost more than overlap takes back" in whole
    assert "tokens are cut" in cut


@pytest.mark.parametrize(
    ("in_turn", "interleaved", "reason"),
    [
        (1.1, 0.8, "tokens are cut"),
        (1.0, 0.98, "leave too little to hide"),
        (1.3, 1.29, "leave too little to hide"),
        (1.3, 1.1, "halves cost more than overlap takes back"),
    ],
)
def test_what_is_said_of_the_times(in_turn, interleaved, reason):
    log = mock.Mock()
    choice._report({"whole": 1.0, "in turn": in_turn, "interleaved": interleaved}, "MoELayer", log)
    assert reason in log.info.call_args.args[-1]


@pytest.mark.parametrize(
    ("ranks", "distributed"),
    [(2, False), pytest.param(4, True, marks=pytest.mark.full)],
    ids=["DP2", "DP4, distributed optimizer"],
)
def test_gradients_are_ready_once(pool, ranks, distributed):
    """With overlapped reduction, every parameter reports its gradient as often as in stock."""
    arguments = {"ep": 2, "distributed": distributed, "switch": ALWAYS}
    for found in pool.run(f"{OVERLAP}:overlapped_reduction", ranks, **arguments):
        ours, theirs = found["ours"], found["theirs"]
        assert ours["golden"] == theirs["golden"]
        assert set(ours["golden"].values()) == {1}
        for name, gradient in theirs["gradients"].items():
            difference = (ours["gradients"][name] - gradient).abs().max()
            assert difference <= 1e-5 * gradient.abs().max(), name
