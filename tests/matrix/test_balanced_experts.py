"""Hot experts that are moved on the release that is installed: the steps of a dispatcher differ."""

from __future__ import annotations

from tests.support import moe

RUNS = {
    "shared expert": {},
    "layer recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def test_layer_beside_stock(pool):
    for rank in pool.run("tests.matrix.moe_cases:balanced", 2, runs=RUNS):
        for name, found in rank.items():
            moe.assert_same(found["ours"], found["theirs"])
            assert len(found["plans"]) == 2 * (2 if name == "layer recomputed" else 1)
            assert any(found["plans"])
