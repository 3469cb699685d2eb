"""Where a part of the model does not learn, the rest learns what it learns in stock's schedule."""

from __future__ import annotations

import pytest

from tests.support.model import assert_same_gradients, losses_of

FROZEN = {
    "embedding": ["embedding"],
    "all before the experts": ["embedding", "layers.0", "self_attention", "norm", "router", "shared_experts"],
}


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=list(FROZEN))
def test_losses_and_gradients(pool, frozen):
    off, on = (
        pool.run(
            "tests.features.pipeline.fb_overlap.frozen_cases:trained",
            2,
            frozen=frozen,
            switches=switches,
            num_microbatches=2,
            micro_batch_size=1,
            ep=2,
            etp=1,
        )
        for switches in ({}, {"moe_fb_overlap": True})
    )
    for before, after in zip(off, on, strict=True):
        assert losses_of(after) == pytest.approx(losses_of(before), rel=1e-6)
        assert any("local_experts" in name for name in after["gradients"])
        assert not any(part in name for name in after["gradients"] for part in frozen)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
    assert any("launch" in rank["events"] for rank in on)
