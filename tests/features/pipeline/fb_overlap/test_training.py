"""Paired forwards and backwards train as the stock schedule does, from the same weights."""

from __future__ import annotations

import pytest

from tests.support.model import assert_same_gradients

CASES = "tests.features.pipeline.fb_overlap.cases"
RUNS = {
    # name: ranks, layout, microbatches, overrides
    "PP1": (2, {}, 3, {"num_layers": 3}),
    "PP1, dense layer last": (2, {}, 2, {"num_layers": 3, "moe_layer_freq": [1, 1, 0]}),
}


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_gradients(pool, name):
    ranks, layout, microbatches, overrides = RUNS[name]
    off, on = (
        pool.run(
            f"{CASES}:trained",
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
        assert before["events"] == []
        assert [float(loss) for loss in after["losses"]] == pytest.approx(
            [float(loss) for loss in before["losses"]], rel=1e-6
        )
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
    assert all("launch" in rank["events"] for rank in on)
