"""An output projection multiplies pieces of rows during the transfer of others, with the same result."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.features.attention.sp_tp_sp.pieces import pieces_of

BESIDE = "tests.features.attention.sp_tp_sp.projected_in_pieces:beside_whole"
RUNS = {
    "as many rows in each": {"rows": 8},
    "other numbers of rows": {"rows": 7, "batch": 2, "pieces_wanted": 3},
    "fewer rows than pieces": {"rows": 2},
    "one piece": {"rows": 6, "pieces_wanted": 1},
    "bf16": {"rows": 8, "batch": 2, "dtype": "bfloat16"},
    "fp64": {"rows": 8, "dtype": "float64"},
    "frozen weight": {"rows": 8, "frozen": True},
    "heads without gradient": {"rows": 8, "first": True},
    "gradient queued": {"rows": 8, "queued": True},
    "bias added": {"rows": 8, "bias": True},
    "no graph": {"rows": 8, "graph": False},
}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_same_as_behind_the_whole_transfer(pool, ranks):
    for found in pool.run(BESIDE, ranks, runs=list(RUNS.values())):
        for name, run in zip(RUNS, found, strict=True):
            assert len(run["ours"]["values"]) == len(run["theirs"]["values"])
            for ours, theirs in zip(run["ours"]["values"], run["theirs"]["values"], strict=True):
                assert (ours is None) == (theirs is None), name
                if ours is not None:
                    # A product of fewer rows may add its terms in another order.
                    exact = {"rtol": 0, "atol": 0} if name == "one piece" else {}
                    torch.testing.assert_close(
                        ours, theirs, msg=lambda text, name=name: f"{name}: {text}", **exact
                    )


AHEAD = ["launch", "launch", "wait", "product", "launch", "wait", "product", "wait", "product"]
"""Forward with three pieces: each piece after the first travels during the product of the piece before it."""
BACK = ["product", "launch"] * 3
"""Backward with three pieces, before the weight gradient and the waits."""


def test_order_of_transfers_and_products(pool):
    runs = [
        {"rows": 6, "pieces_wanted": 3, **more}
        for more in ({}, {"frozen": True}, {"queued": True}, {"first": True})
    ]
    for found in pool.run(BESIDE, 2, runs=runs):
        learns, frozen, queued, first = (run["ours"] for run in found)
        for run in (learns, frozen, queued, first):
            assert run["forward"] == AHEAD * 2
        assert learns["backward"] == [*BACK, "product", "wait", "wait", "wait"] * 2
        assert frozen["backward"] == queued["backward"] == [*BACK, "wait", "wait", "wait"] * 2
        assert first["backward"] == ["product"] * 2


@pytest.mark.parametrize(
    ("rows", "batch", "sizes"),
    [
        (4096, 1, [1024] * 4),
        (300, 2, [150, 150]),
        (511, 1, [511]),
        (3, 1, [3]),
        (2, 2048, [1, 1]),
    ],
)
def test_pieces_are_large_enough_for_a_device(rows, batch, sizes):
    assert [end - first for first, end in pieces_of(rows, batch)] == sizes
