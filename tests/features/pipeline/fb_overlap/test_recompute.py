"""Layers recomputed in pairs: bit-identical to kept activations; transfers, counts and memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.features.pipeline.fb_overlap.recompute import Recomputed
from tests.support.model import SEQUENCE, assert_same_gradients, losses_of

CASES = "tests.features.pipeline.fb_overlap.recomputed_steps"
PAIRS = {"moe_fb_overlap": True}
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
NO_SHARED = {"moe_shared_expert_intermediate_size": None}
INTERLEAVED = {"pp": 2, "vpp": 2}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "moe_input_jitter_eps": 0.1}
LAST_DENSE = {"num_layers": 3, "moe_layer_freq": [1, 1, 0], **NO_SHARED}
MODULES = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "shared_experts"]}
AND_MOE = {"recompute_modules": ["mlp", "shared_experts", "moe"]}
NORMS = {"recompute_norm": True, "recompute_verify": True}
FUSED = {"use_fused_dsa": True}
ONE_SELECTS = {"num_layers": 4, "dsa_indexer_topk_freq": 4}
HALF_SELECT = {"num_layers": 8, "dsa_indexer_topk_freq": 2}
SWAPPED = {"swap_attention": True, "swap_attention_min_bytes": 0}
RUNS = {
    # name: ranks, layout, microbatches, model, recomputation, other switches, recomputed layers per rank
    "first layer dense": (2, {}, 3, {"num_layers": 3}, UNIFORM, {}, [9, 9]),
    "experts alone": (2, {}, 3, {"num_layers": 3}, MOE, {}, [6, 6]),
    "one microbatch": (2, {}, 1, {}, UNIFORM, {}, [2, 2]),
    "last layer dense": (2, {}, 2, LAST_DENSE, UNIFORM, {}, [6, 6]),
    "several layers at once": (2, {}, 2, LAST_DENSE, {**UNIFORM, "recompute_num_layers": 3}, {}, [6, 6]),
    "first layers": (2, {}, 2, {"num_layers": 3}, {**BLOCK, "recompute_num_layers": 2}, {}, [4, 4]),
    "no shared expert": (2, {}, 2, NO_SHARED, MOE, {}, [2, 2]),
    "one expert per rank": (
        2,
        {},
        2,
        {"num_moe_experts": 2, "moe_shared_expert_gate": True},
        UNIFORM,
        {},
        [4, 4],
    ),
    "dropout and jitter": (2, {}, 3, {"num_layers": 3, **DROPOUT}, UNIFORM, {}, [9, 9]),
    "experts alone, dropout and jitter": (2, {}, 3, {"num_layers": 3, **DROPOUT}, MOE, {}, [6, 6]),
    "TP2+SP": (2, {"tp": 2}, 2, {"moe_shared_expert_gate": True, **DROPOUT}, UNIFORM, {}, [4, 4]),
    "multi-token prediction": (2, {}, 3, {"mtp_num_layers": 1}, UNIFORM, {}, [9, 9]),
    "experts alone, multi-token prediction": (2, {}, 3, {"mtp_num_layers": 1}, MOE, {}, [6, 6]),
    "block, multi-token prediction": (2, {}, 3, {"mtp_num_layers": 1}, BLOCK, {}, [3, 3]),
    "PP2 x VPP2": (4, INTERLEAVED, 4, {"num_layers": 4}, UNIFORM, {}, [8] * 4),
    "PP2 x VPP2, experts alone": (4, INTERLEAVED, 4, {"num_layers": 4}, MOE, {}, [4, 4, 8, 8]),
    "PP2 x VPP2, multi-token prediction": (
        4,
        INTERLEAVED,
        4,
        {"num_layers": 4, "mtp_num_layers": 1},
        UNIFORM,
        {},
        [8, 8, 12, 12],
    ),
    "fused DSA": (2, {}, 2, {}, UNIFORM, FUSED, [4, 4]),
    "shared selection": (2, {}, 3, ONE_SELECTS, UNIFORM, FUSED, [12, 12]),
    "shared selection, Megatron's attention": (2, {}, 3, ONE_SELECTS, UNIFORM, {}, [12, 12]),
    # The third layer reads a selection. Its last reader is the fourth layer, which keeps its activations.
    "shared selection, first three": (
        2,
        {},
        3,
        ONE_SELECTS,
        {**BLOCK, "recompute_num_layers": 3},
        FUSED,
        [9, 9],
    ),
    "shared selection, experts alone": (2, {}, 3, ONE_SELECTS, MOE, FUSED, [9, 9]),
    "shared selection, TP2+SP": (2, {"tp": 2}, 2, ONE_SELECTS, UNIFORM, FUSED, [8, 8]),
    "shared selection, multi-token prediction": (
        2,
        {},
        3,
        {**ONE_SELECTS, "mtp_num_layers": 1, "dsa_indexer_share_for_mtp": True},
        UNIFORM,
        FUSED,
        [15, 15],
    ),
    "shared selection, PP2 x VPP2": (4, INTERLEAVED, 4, HALF_SELECT, UNIFORM, FUSED, [16] * 4),
    "shared selection, PP2 x VPP2, first layers": (4, INTERLEAVED, 4, HALF_SELECT, BLOCK, FUSED, [8] * 4),
    "grouped experts": (
        2,
        {},
        2,
        {"moe_grouped_gemm": True},
        UNIFORM,
        {"moe_grouped_gemm": True},
        [4, 4],
    ),
    "fused permutation": (
        2,
        {},
        2,
        {"moe_permute_fusion": True},
        UNIFORM,
        {"moe_permute_fusion": True},
        [4, 4],
    ),
    "modules inside": (2, {}, 2, MODULES, AND_MOE, {}, [2, 2]),
    "norms recomputed beside": (2, {}, 3, {"num_layers": 3}, MOE, NORMS, [6, 6]),
    "norms recomputed behind": (2, {}, 3, {"num_layers": 3}, BLOCK, NORMS, [3, 3]),
    "attention swapped": (2, {}, 3, {"num_layers": 3}, MOE, SWAPPED, [6, 6]),
    "layers behind swapped": (2, {}, 3, {"num_layers": 3}, BLOCK, SWAPPED, [3, 3]),
}
QUICK = ("experts alone, dropout and jitter",)


def step(pool, run, switches, recomputed):
    """Run a step of an entry of ``RUNS``, whose last element are its switches."""
    ranks, layout, microbatches, overrides, others = run
    return pool.run(
        f"{CASES}:trained",
        ranks,
        switches={**others, **switches},
        overrides={**overrides, **recomputed},
        num_microbatches=microbatches,
        micro_batch_size=1,
        **{"ep": 2, "etp": 1, **layout},
    )


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in RUNS]
)
def test_losses_and_gradients(pool, name):
    """Recomputation is bit-identical to pairs that keep activations; without dropout it agrees with stock."""
    # An expert layer repeats only its dispatch: two transfers.
    *run, recomputed, others, again = RUNS[name]
    kept, ours = (step(pool, (*run, others), PAIRS, what) for what in ({}, recomputed))
    for before, after, layers in zip(kept, ours, again, strict=True):
        assert after["losses"] == before["losses"]
        assert after["gradients"].keys() == before["gradients"].keys()
        if "norms" not in name:  # the norms are several operations, which round gradients in another order
            assert all(
                torch.equal(gradient, before["gradients"][weight])
                for weight, gradient in after["gradients"].items()
            )
        assert before["pieces"] == {"recompute_before": 0, "recompute_experts": 0}
        assert after["pieces"] == {"recompute_before": layers, "recompute_experts": layers}
        launched, dispatches = (side["events"].count("launch") for side in (after, before))
        assert dispatches <= launched <= dispatches + 2 * layers
        # With `block`, the recomputed layer is the first one, which is dense and sends no tokens.
        assert (launched > dispatches) == ("block" not in name and "behind" not in name)
    if "dropout" not in name and "TP2" not in name:
        stock = step(pool, (*run, others), {}, recomputed)
        for theirs, after in zip(stock, ours, strict=True):
            assert losses_of(after) == pytest.approx(losses_of(theirs), rel=1e-6)
            assert_same_gradients(after["gradients"], theirs["gradients"], rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("recomputed", [UNIFORM, pytest.param(MOE, marks=pytest.mark.full)])
def test_losses_and_tokens_count_once(pool, recomputed):
    """Auxiliary and z-loss, the indexer loss, and the token counts of the expert bias count once."""
    counting = {
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.1,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    kept, ours = (
        pool.run(
            f"{CASES}:counted",
            2,
            switches=PAIRS,
            overrides={**counting, **what},
            num_microbatches=2,
            micro_batch_size=1,
            ep=2,
            etp=1,
        )
        for what in ({}, recomputed)
    )
    for before, after in zip(kept, ours, strict=True):
        assert after["routers"].keys() == before["routers"].keys() == {"seq_load_balancing_loss", "z_loss"}
        for name, values in before["routers"].items():
            assert values.any()
            assert torch.equal(values, after["routers"][name])
        assert before["indexers"].any()
        assert torch.equal(before["indexers"], after["indexers"])
        assert torch.equal(torch.stack(before["tokens"]), torch.stack(after["tokens"]))
        assert int(before["tokens"][0].sum()) == 2 * SEQUENCE * 2  # microbatches x tokens x experts per token


@pytest.mark.full
def test_a_recomputed_layer_keeps_its_input(pool):
    # Bytes per layer, from two more layers: the input, the routing, and random states.
    size = 32
    bytes_of_input = 4 * SEQUENCE * size * 32

    def kept(**overrides):
        few, many = (
            pool.run(f"{CASES}:kept", 2, layers=layers, overrides=overrides, micro_batch_size=size)[0]
            for layers in (1, 3)
        )
        return (many - few) / 2 / bytes_of_input

    whole, full, experts = kept(), kept(**UNIFORM), kept(**MOE)
    print(f"kept per layer, in inputs: {whole:.2f} whole, {full:.2f} recomputed, {experts:.2f} experts alone")
    assert 1 <= full < 1.5
    assert full < experts < whole - 4
    assert whole > 10


@pytest.mark.full
@pytest.mark.parametrize("selecting", [1, 2])
def test_layers_that_share_keep_one_selection(pool, selecting):
    """Only the indices are kept in addition to layer inputs, once for all layers that read them."""
    size, topk = 32, 8
    shared, separate = (
        pool.run(
            f"{CASES}:kept",
            2,
            layers=4,
            overrides={**UNIFORM, "dsa_indexer_topk": topk, "dsa_indexer_topk_freq": frequency},
            micro_batch_size=size,
        )[0]
        for frequency in (4 // selecting, 1)
    )
    indices = selecting * size * SEQUENCE * topk * 8  # Megatron's indices are int64
    # Some KB differ: an absent indexer keeps no rotary angles, and a process's first step caches a mask. A
    # selection kept by each reader would take at least twice the bytes.
    assert shared - separate == pytest.approx(indices, rel=0.1)


@pytest.mark.full
@pytest.mark.parametrize("sharded", [{}, {"fsdp2_shard_experts": True}], ids=["dense", "experts too"])
@pytest.mark.parametrize("recomputed", [UNIFORM, MOE], ids=["layers", "experts"])
def test_with_sharded_weights(pool, recomputed, sharded):
    """FSDP2 steps with an optimizer, clipping and multi-token prediction are bit-identical."""
    kept, ours = (
        pool.run(
            "tests.features.data_parallel.fsdp2.pairs_cases:train",
            4 if sharded else 2,
            switches={**PAIRS, **sharded},
            overrides=overrides,
        )
        for overrides in ({}, recomputed)
    )
    for before, after in zip(kept, ours, strict=True):
        assert after["records"] == before["records"]
        assert all(torch.equal(each, before["weights"][name]) for name, each in after["weights"].items())


AHEAD = {
    # name: ranks, layout, layers, microbatches, recomputation, ahead by rank (in bubbles, in advance). One
    # layer per chunk, 8 backwards. The first stage has 5 warmups and waits for 6 gradients, its first
    # one and the cooldown's. The last stage has 3 warmups and waits for 2; the others are its own.
    "PP2 x VPP2": (4, INTERLEAVED, 4, 4, UNIFORM, (6, 6, 2, 2), (8, 8, 4, 4)),
    "experts alone": (4, INTERLEAVED, 4, 4, MOE, (3, 3, 2, 2), (4, 4, 4, 4)),
    # Two layers per chunk; the second reads the first one's selection.
    "shared selections": (
        4,
        INTERLEAVED,
        8,
        4,
        {**UNIFORM, "dsa_indexer_topk_freq": 2},
        (12, 12, 4, 4),
        (16, 16, 8, 8),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", AHEAD)
def test_ahead_of_the_gradient(pool, name):
    """Results are bit-identical; the schedule's list decides which recomputations run in a bubble."""
    ranks, layout, layers, microbatches, recomputed, bubbles, advance = AHEAD[name]
    in_place, *ahead = (
        step(
            pool,
            (ranks, layout, microbatches, {"num_layers": layers}, switches),
            PAIRS,
            recomputed,
        )
        for switches in ({}, {"recompute_in_bubble": True}, {"recompute_in_advance": True})
    )
    for ours, expected in zip(ahead, (bubbles, advance), strict=True):
        assert tuple(rank["when"]["ahead"] for rank in ours) == expected
        for before, after in zip(in_place, ours, strict=True):
            assert after["losses"] == before["losses"]
            assert all(
                torch.equal(each, before["gradients"][weight]) for weight, each in after["gradients"].items()
            )
            total = sum(after["when"].values())
            assert total == before["pieces"]["recompute_experts"]
            assert after["events"].count("launch") == before["events"].count("launch")


def test_rows_that_go_elsewhere_than_in_forward_are_an_error():
    """The reversed combine uses the first forward's order, so changed routing would mix up rows."""
    routing = torch.tensor([[True, False], [False, True]])
    again = Recomputed.__new__(Recomputed)
    again._layer = SimpleNamespace(layer_number=3)
    again._routing, again._dispatcher = routing, {"routing_map": routing.clone()}
    again._compare_routing()
    again._require_same_routing()
    again._routing, again._dispatcher = routing, {"routing_map": routing.flip(0)}
    again._compare_routing()
    with pytest.raises(RuntimeError, match=r"layer 3: tokens have other experts.*--deterministic-mode"):
        again._require_same_routing()
