"""Overlapped all-to-alls on the release that is installed: the steps of a MoE layer differ."""

from __future__ import annotations

from tests.support import moe

RUNS = {
    "shared expert": {},
    "none": {"moe_shared_expert_intermediate_size": None},
    "layer recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def test_layer_beside_stock(pool):
    for rank in pool.run("tests.matrix.moe_cases:overlapped", 2, runs=RUNS):
        for name, found in rank.items():
            moe.assert_same(found["ours"], found["theirs"])
            assert found["launched"] == 2 * (9 if name == "layer recomputed" else 6)
