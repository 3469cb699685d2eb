"""Permutations on the second stream in pairs: the same bits, with correct synchronization."""

from __future__ import annotations

import pytest
import torch

from tests.features.moe.balanced_experts.popular_experts import ALWAYS
from tests.features.pipeline.fb_overlap.streams_cases import SWITCHES
from tests.support import model
from tests.support.memory_events import BESIDE

CASES = "tests.features.pipeline.fb_overlap.streams_cases"
PAIRS = {"moe_fb_overlap": True}
INTERLEAVED = {"pp": 2, "vpp": 2}
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "moe_input_jitter_eps": 0.1}
NORMS = {"recompute_norm": True, "recompute_activation_function": True, "recompute_verify": True}
SWAPPED = {
    "swap_attention": True,
    "swap_modules": "input_norm,self_attention,post_attention_norm",
    "swap_attention_min_bytes": 0,
}
THREE = {"num_layers": 3}
RUNS = {
    # name: layout, microbatches, model, other switches, (permutations, unpermutations) per rank
    "first layer dense": ({}, 3, THREE, {}, [(6, 3)] * 2),
    "no shared expert": ({}, 2, {**THREE, "moe_shared_expert_intermediate_size": None}, {}, [(4, 2)] * 2),
    "TP2+SP": ({"tp": 2}, 2, {**THREE, "moe_shared_expert_gate": True}, {}, [(4, 2)] * 2),
    "all recomputed": ({}, 3, {**THREE, **DROPOUT, **UNIFORM}, {}, [(12, 3)] * 2),
    "experts recomputed": ({}, 3, {**THREE, **MOE, "mtp_num_layers": 1}, {}, [(18, 3)] * 2),
    "norms and activations recomputed": ({}, 2, THREE, NORMS, [(4, 2)] * 2),
    "attention swapped": ({}, 3, THREE, SWAPPED, [(6, 3)] * 2),
    "fused": (
        {},
        2,
        {**THREE, "moe_permute_fusion": True},
        {"use_fused_dsa": True, "moe_permute_fusion": True},
        [(4, 2)] * 2,
    ),
    "padded to capacity": (
        {},
        2,
        {**THREE, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {},
        [(4, 2)] * 2,
    ),
    "hot experts": ({}, 2, THREE, {**ALWAYS, "balanced_moe_hot_expert_num": 2}, [(0, 0)] * 2),
    "PP2 x VPP2, multi-token prediction": (
        INTERLEAVED,
        4,
        {"num_layers": 8, "mtp_num_layers": 1},
        {},
        [(12, 4), (12, 4), (20, 8), (20, 8)],
    ),
}
QUICK = ("first layer dense",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in RUNS]
)
def test_the_bits_of_pairs_on_one_stream(pool, name):
    """Only the unpermutation of a chunk's last layer stays on the first stream."""
    layout, microbatches, overrides, others, expected = RUNS[name]
    one, two = (
        pool.run(
            f"{CASES}:trained",
            len(expected),
            switches={**others, **switches},
            overrides=overrides,
            num_microbatches=microbatches,
            micro_batch_size=1,
            **{"ep": 2, "etp": 1, **layout},
        )
        for switches in (PAIRS, SWITCHES)
    )
    for before, after, (permutations, unpermutations) in zip(one, two, expected, strict=True):
        assert after["losses"] == before["losses"]
        assert after["gradients"].keys() == before["gradients"].keys()
        for parameter, gradient in before["gradients"].items():
            assert torch.equal(after["gradients"][parameter], gradient), parameter
        assert after["events"].count("launch") == before["events"].count("launch") > 0
        assert not any(node.endswith("second") for node in before["nodes"])
        found = {node: count for node, count in after["nodes"].items() if node.endswith("second")}
        again = 2 if "all" in name or "experts recomputed" in name else 1
        assert found == {
            node: count
            for node, count in {
                "forward permutation second": permutations,
                "backward permutation second": permutations // again,
                "forward moe_combine second": unpermutations,
                "backward moe_combine second": unpermutations,
            }.items()
            if count
        }
        assert after["counts"][BESIDE] > 0, "the indexer's projections"


SWAPPING = {"swap_attention": True, "swap_attention_min_bytes": 0}
REDUNDANT = {"first": {2, 5, 7, 11}, "second": {8, 13, 14, 16}}
"""Redundant waits: the node before has already waited, or the wait follows a transfer."""


@pytest.mark.full
@pytest.mark.parametrize("switches", [{}, pytest.param(SWAPPING, marks=pytest.mark.full)], ids=["", "swap"])
def test_no_stream_reads_what_another_has_not_done(pool, switches):
    # Memory of one stream must also not be reused before the other stream is done with it.
    for found in pool.run(f"{CASES}:races", 2, switches=switches):
        assert found["races"] == found["freed early"] == []
        assert min(found["waits"][name] for name in ("first", "second")) > 10


@pytest.mark.full
@pytest.mark.parametrize("recomputed", [UNIFORM, MOE], ids=["layers", "experts"])
def test_nor_where_layers_run_again(pool, recomputed):
    for found in pool.run(f"{CASES}:races", 2, overrides=recomputed):
        assert found["races"] == found["freed early"] == []


@pytest.mark.full
@pytest.mark.parametrize(("stream", "waits"), [("first", 15), ("second", 16)])
def test_a_wait_that_is_missing_is_a_race(pool, stream, waits):
    for number in range(1, waits + 1):
        for found in pool.run(f"{CASES}:races", 2, dropped={stream: number}):
            assert found["waits"][stream] >= waits
            assert bool(found["races"]) == (number not in REDUNDANT[stream]), number


@pytest.mark.full
def test_memory_that_the_allocator_is_not_told_of_is_given_away_early(pool):
    for found in pool.run(f"{CASES}:races", 2, forgets=True):
        assert found["freed early"]


@pytest.mark.full
def test_few_tokens_stay_on_the_first_stream(pool):
    for found in pool.run(f"{CASES}:races", 2, switches={"two_streams_min_tokens": model.SEQUENCE + 1}):
        assert found["waits"] == {}


@pytest.mark.full
@pytest.mark.parametrize("overrides", [UNIFORM, MOE, {}], ids=["layers", "experts", "nothing"])
def test_nothing_more_is_kept_for_backward(pool, overrides):
    """The norm's output, where the permutation's graph starts, is kept or recomputed anyway."""
    one, two = (
        pool.run(
            "tests.features.pipeline.fb_overlap.recomputed_steps:kept",
            2,
            layers=3,
            overrides=overrides,
            micro_batch_size=16,
            switches=switches,
        )
        for switches in ({}, SWITCHES)
    )
    assert all(after <= 1.02 * before for before, after in zip(one, two, strict=True)), (one, two)
