"""Paired forwards and backwards on the release that is installed: the steps of a layer differ."""

from __future__ import annotations

import pytest

from tests.support.model import assert_same_gradients

AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "shared_experts"]}
RUNS = {
    # name: ranks, layout, microbatches, overrides
    "PP1": (2, {}, 3, {"num_moe_experts": 2, "num_layers": 3, "moe_layer_freq": [0, 1, 0]}),
    "PP1, recomputed modules": (2, {}, 2, {"moe_layer_freq": [0, 1], **AGAIN}),
    "PP2 x VPP2": (4, {"pp": 2, "vpp": 2}, 4, {"num_layers": 4, "moe_layer_freq": [0, 1, 1, 1]}),
}


@pytest.mark.parametrize("name", RUNS)
def test_step_beside_stock(pool, name):
    ranks, layout, microbatches, overrides = RUNS[name]
    off, on = (
        pool.run(
            "tests.matrix.moe_cases:whole_step",
            ranks,
            switches=switches,
            overrides=overrides,
            num_microbatches=microbatches,
            micro_batch_size=1,
            ep=2,
            etp=1,
            **layout,
        )
        for switches in ({}, {"moe_fb_overlap": True})
    )
    for before, after in zip(off, on, strict=True):
        assert [float(loss) for loss in after["losses"]] == pytest.approx(
            [float(loss) for loss in before["losses"]], rel=1e-6
        )
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
    assert sum(rank["launched"] for rank in on) > 0
