"""Deferred weight gradients of sharded weights are bit-identical, and need no gathered weights."""

from __future__ import annotations

import pytest
import torch

STEP = "tests.features.data_parallel.fsdp2.test_recompute_ahead:step"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PAIRS, V = {"moe_fb_overlap": True}, {"schedules_method": "dualpipev"}
SPLIT, DETACHED = {"split_backward": True}, {"dualpipev_dw_detach": True}
EXPERTS = {"fsdp2_shard_experts": True}
RUNS = {
    # name: switches of both runs, switches that defer gradients, model, chunks
    "PP2": ({}, SPLIT, {}, None),
    "PP2 x VPP2, pairs": ({**PAIRS, **EXPERTS}, SPLIT, {}, 2),
    "PP2 x VPP2, pairs, layers recomputed": (PAIRS, SPLIT, FULL, 2),
    "DualPipeV": ({**V, **EXPERTS}, DETACHED, {}, 2),
    "DualPipeV, pairs": ({**V, **PAIRS}, DETACHED, {}, 2),
    "DualPipeV, pairs, layers recomputed": ({**V, **PAIRS, **EXPERTS}, DETACHED, FULL, 2),
}


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_weights_are_dropped_as_without(pool, name):
    both, waits, overrides, vpp = RUNS[name]
    whole, split = (
        pool.run(
            STEP,
            4,
            switches={**both, **more},
            overrides=overrides,
            vpp=vpp,
            ep=2 if "pairs" in name else 1,
        )
        for more in ({}, waits)
    )
    for before, after in zip(whole, split, strict=True):
        assert after["losses"] == before["losses"]
        assert len(after["gradients"]) == len(before["gradients"]) > 0
        assert all(map(torch.equal, after["gradients"], before["gradients"]))
        assert after["gathered at once"] == before["gathered at once"]
        assert after["gathers"] == before["gathers"]
        assert after["waited"] > before["waited"] == 0
