"""Layers that run one half's attention during the other half's transfers train like unsplit layers."""

from __future__ import annotations

import pytest
import torch

from tests.features.moe.alltoall_overlap.test_model import MEMORY, OVERLAPPED, RECOMPUTED
from tests.features.moe.balanced_experts.popular_experts import ALWAYS as HOT_EXPERTS
from tests.features.moe.batch_overlap.layer_in_halves import ALWAYS, ATTENTION, FASTER, MEASURED, SLOWER
from tests.features.moe.batch_overlap.test_model import FUSED, INTERLEAVED, WHOLE_EXPERTS
from tests.support.model import assert_same_gradients, losses_of
from tests.support.stand_in import measures

BALANCED = {
    "moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.25, 0.125],
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
ONE = {"micro_batch_size": 1, "num_microbatches": 2}
DENSE = {"num_layers": 3, "moe_layer_freq": [0, 1, 1]}
SELECTIVE = {"recompute_granularity": "selective"}
RUNS = {
    # name: ranks, arguments, other switches
    "three layers": (2, {"num_microbatches": 2, "overrides": {"num_layers": 4}}, {}),
    "an odd number of sequences": (2, {"micro_batch_size": 3, "overrides": {"num_layers": 3}}, {}),
    "balanced": (2, {"overrides": {"num_layers": 3, **BALANCED}}, {}),
    "memory features": (2, {"overrides": {"num_layers": 3}}, MEMORY),
    "core attention recomputed": (2, {"overrides": {**SELECTIVE, "recompute_modules": ["core_attn"]}}, {}),
    "shared expert recomputed": (
        2,
        {"overrides": {**SELECTIVE, "recompute_modules": ["shared_experts", "mla_up_proj"]}},
        {},
    ),
    "dense attention": (2, {"dense": True, "overrides": DENSE}, {}),
    "rows, dense attention": (2, {"dense": True, "overrides": DENSE, **ONE}, {}),
    "rows": (2, {"overrides": {"num_layers": 3, "dsa_indexer_topk": 12}, **ONE}, {"use_fused_dsa": True}),
    "rows, few keys": (2, {"overrides": {"num_layers": 3}, **ONE}, {"use_fused_dsa": True}),
    "rows, by head": (
        2,
        {"overrides": {"num_layers": 3}, **ONE},
        {"use_fused_dsa": True, "use_dsa_absorb": False},
    ),
    "rows, core attention recomputed": (
        2,
        {"overrides": {**SELECTIVE, "recompute_modules": ["core_attn"]}, **ONE},
        {"use_fused_dsa": True},
    ),
    "rows, loss in backward": (
        2,
        {"overrides": {"num_layers": 3}, **ONE},
        {"use_fused_dsa": True, "use_dsa_absorb": True, "dsa_fuse_kl_in_backward": True},
    ),
    "rows, all layers recomputed": (
        2,
        {"overrides": {"num_layers": 3, **RECOMPUTED}, **ONE},
        {"use_fused_dsa": True},
    ),
    "rows, memory features": (2, {"overrides": {"num_layers": 3}, **ONE}, {"use_fused_dsa": True, **MEMORY}),
    "grouped experts, fused permutation": (2, {"overrides": {"num_layers": 3, **FUSED}}, FUSED),
    "beside overlap of the whole": (2, {}, {"moe_alltoall_overlap_comm": True}),
    "TP2+SP": (2, {"tp": 2, "overrides": WHOLE_EXPERTS, "ddp": {"overlap_grad_reduce": True}}, {}),
    "fused DSA": (2, {"overrides": {"num_layers": 3}}, {"use_fused_dsa": True}),
    "all layers recomputed": (2, {"overrides": {"num_layers": 3, **RECOMPUTED}}, {}),
    "distributed optimizer, overlap": (2, {"num_microbatches": 2, "ddp": OVERLAPPED}, {}),
    "two streams": (2, {"overrides": {"num_layers": 3}}, {"use_fused_dsa": True, "two_streams": True}),
    "rows, two streams": (
        2,
        {"overrides": {"num_layers": 3}, **ONE},
        {"use_fused_dsa": True, "two_streams": True},
    ),
    "PP2 x VPP2": (4, INTERLEAVED, {}),
}
QUICK = ("balanced",)
CASES = "tests.features.moe.batch_overlap.attention_in_halves"


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in RUNS]
)
def test_losses_and_gradients(pool, name):
    ranks, arguments, beside = RUNS[name]
    off, on = (
        pool.run(f"{CASES}:trained", ranks, ep=2, etp=1, switches={**beside, **switch}, **arguments)
        for switch in ({}, ATTENTION)
    )
    for before, after in zip(off, on, strict=True):
        assert losses_of(after) == pytest.approx(losses_of(before), rel=1e-6)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
        assert after["balancing"].keys() == before["balancing"].keys()
        for kind, values in before["balancing"].items():
            torch.testing.assert_close(after["balancing"][kind], values, rtol=1e-6, atol=0, msg=kind)
        assert before["halves"] == 0 < after["halves"]
    overrides = arguments.get("overrides", {})
    # With full recomputation or chunks of one layer, no half is passed on directly.
    several = overrides.get("num_layers", 2) > 2 and arguments.get("vpp") is None
    recomputed = overrides.get("recompute_granularity") == "full"
    assert all((rank["handed on"] > 0) == (several and not recomputed) for rank in on)


@pytest.mark.parametrize("sequences", [2, 1])
def test_layers_of_experts_alone_keep_halves_of_tokens(pool, sequences):
    """A hybrid model has them. Attention that decides by itself leaves them; their tokens run in halves."""
    arguments = {"ep": 2, "etp": 1, "micro_batch_size": sequences, "num_microbatches": 2}
    off, on = (
        pool.run(f"{CASES}:trained", 2, experts_alone=True, switches=switches, **arguments)
        for switches in ({}, {"moe_batch_overlap": True, "moe_batch_overlap_always": True})
    )
    for before, after in zip(off, on, strict=True):
        assert losses_of(after) == pytest.approx(losses_of(before), rel=1e-6)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
        assert after["halves"] == 0
        assert after["launched"] > before["launched"]


@pytest.mark.full
@pytest.mark.parametrize("halves", [ATTENTION, ALWAYS], ids=["", "of tokens"])
def test_moved_experts(pool, halves):
    """Each half has a plan, and each plan's experts are moved."""
    arguments = {"ep": 2, "etp": 1, "overrides": {"num_layers": 3}}
    stock, ours = (
        pool.run(f"{CASES}:moved", 2, switches=switches, **arguments)
        for switches in ({}, {**HOT_EXPERTS, **halves})
    )
    for before, after in zip(stock, ours, strict=True):
        assert losses_of(after) == pytest.approx(losses_of(before), rel=1e-6)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
        assert len(after["plans"]) == 2 * 2  # layers with experts x halves
        assert any(after["plans"][:2])
        assert any(after["plans"][2:])


@pytest.mark.parametrize("sequences", [2, pytest.param(1, marks=pytest.mark.full)])
def test_order_of_events(pool, sequences):
    """Each transfer overlaps the other half's computation; the last one overlaps the shared expert."""
    switch = {**ATTENTION, "use_fused_dsa": True}
    for events in pool.run(f"{CASES}:order", 2, switch=switch, sequences=sequences):
        assert events["forward"] == [
            *("attention 1", "launch", "launch", "attention 1", "wait", "wait"),  # dispatch 0
            *("launch", "launch", "experts 1", "shared expert 1", "wait", "wait"),  # dispatch 1
            *("launch", "experts 1", "shared expert 1", "wait"),  # combine 0
            *("launch", "attention 2", "wait"),  # combine 1
            *("launch", "launch", "attention 2", "wait", "wait"),
            *("launch", "launch", "experts 2", "wait", "wait", "launch", "experts 2", "wait"),
            *("launch", "shared expert 2", "shared expert 2", "wait"),
        ]
        assert events["backward"] == [
            *("launch", "shared expert 2", "shared expert 2", "wait"),
            *("launch", "experts 2", "wait", "launch", "launch", "experts 2", "wait", "wait"),
            *("launch", "launch", "attention 2", "wait", "wait"),
            *("launch", "attention 2", "wait"),  # combine of half 1, layer below
            *("launch", "shared expert 1", "experts 1", "wait"),  # combine 0
            *("launch", "launch", "shared expert 1", "experts 1", "wait", "wait"),  # dispatch 1
            *("launch", "launch", "attention 1", "wait", "wait", "attention 1"),  # dispatch 0
        ]


@pytest.mark.full
@measures
def test_measured_with_attention(pool):
    """The first step measures three ways: unsplit layers, halves in turn, and interleaved halves."""
    layout = {"ep": 2, "etp": 1, "overrides": BALANCED}
    stock = pool.run(f"{CASES}:trained", 2, switches={}, **layout)
    switches = {**MEASURED, "moe_batch_overlap_attention": True}
    for seconds, said, of_layers in ((FASTER, "tokens are cut", 1), (SLOWER, "tokens stay whole", 2)):
        ranks = pool.run(f"{CASES}:measured", 2, seconds=seconds, switches=switches, **layout)
        for rank, theirs in zip(ranks, stock, strict=True):
            assert rank["ways"] == of_layers * 6 * ["whole", "in turn", "interleaved"]
            (line,) = [line for line in rank["lines"] if "TransformerLayer takes" in line]
            assert said in line
            assert rank["handed on"] == 0
            # Six measurements with halves in turn and six interleaved, and the step that uses the choice.
            assert rank["halves"] == 2 * (12 + (seconds is FASTER))
            assert_same_gradients(rank["gradients"], theirs["gradients"], rtol=1e-5)
            for kind, values in theirs["balancing"].items():
                torch.testing.assert_close(rank["balancing"][kind], values, rtol=1e-6, atol=0, msg=kind)
