"""MoE layers compared with stock on the installed release, as their steps differ between releases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from packaging.version import Version

from mindspeed_dsa.features.moe.batch_overlap.stages import Stages
from mindspeed_dsa.features.pipeline.recompute_ahead.ahead import Ahead
from tests.features.moe.alltoall_overlap.overlapped_layer import SWITCH
from tests.features.moe.balanced_experts.popular_experts import ALWAYS, watched
from tests.features.moe.batch_overlap.layer_in_halves import ALWAYS as HALVES
from tests.features.moe.batch_overlap.layer_in_halves import ATTENTION as HALVES_OF_ATTENTION
from tests.features.moe.batch_overlap.layer_in_halves import MEASURED
from tests.matrix.model import EXPERTS, one_step
from tests.support import model, moe
from tests.support.contexts import running
from tests.support.counting import counted
from tests.support.model import assert_same_gradients, losses_of

RUNS: dict[str, dict[str, Any]] = {
    "shared expert": {},
    "none": {"moe_shared_expert_intermediate_size": None},
    "layer recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "shared_experts"]}
STEPS = {
    # name: ranks, layout, microbatches, overrides
    "PP1": (2, {}, 3, {"num_moe_experts": 2, "num_layers": 3, "moe_layer_freq": [0, 1, 0]}),
    "PP1, recomputed modules": (2, {}, 2, {"moe_layer_freq": [0, 1], **AGAIN}),
    "PP2 x VPP2": (4, {"pp": 2, "vpp": 2}, 4, {"num_layers": 4, "moe_layer_freq": [0, 1, 1, 1]}),
}

GROUPED = "tests.features.moe.grouped_experts.beside_sequential"
DSA = {"experimental_attention_variant": "dsa"}  # so that older releases know the tests' configuration
RELEASE = Version(metadata.version("megatron-core"))


@pytest.mark.releases(">=0.13")
def test_overlapped_alltoalls_beside_stock(pool):
    for rank in pool.run(f"{__name__}:overlapped", 2, runs=RUNS):
        for name, found in rank.items():
            moe.assert_same(found["ours"], found["theirs"])
            assert found["launched"] == 2 * (9 if name == "layer recomputed" else 6)


@pytest.mark.releases(">=0.14")
@pytest.mark.parametrize("switch", [HALVES, MEASURED], ids=["cut", "measured"])
def test_overlapped_halves_beside_stock(pool, switch):
    for rank in pool.run(f"{__name__}:overlapped", 2, runs=RUNS, switch=switch):
        for name, result in rank.items():
            moe.assert_same(result["ours"], result["theirs"])
            expected = 2 * (18 if name == "layer recomputed" else 12)
            assert result["launched"] == expected or switch == MEASURED


@pytest.mark.releases(">=0.14")
@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("beside", [{}, SWITCH], ids=["alone", "beside overlap of the whole"])
def test_halves_of_attention_beside_stock(pool, beside, recomputed):
    """Each of two consecutive MoE layers attends in halves."""
    overrides = {"num_layers": 3, "moe_layer_freq": [0, 1, 1], **(WHOLE if recomputed else {})}
    layout = {"overrides": overrides, "num_microbatches": 2, "micro_batch_size": 2, "ep": 2, "etp": 1}
    off, on = (
        pool.run(f"{__name__}:whole_step", 2, switches=switches, **layout)
        for switches in ({}, {**HALVES_OF_ATTENTION, **beside})
    )
    for before, after in zip(off, on, strict=True):
        assert losses_of(after) == pytest.approx(losses_of(before), rel=1e-6)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
        assert before["halves"] == 0
        assert after["halves"] == 2 * 2 * 2 * (1 + recomputed)


@pytest.mark.releases(">=0.14")
def test_halves_beside_recomputed_core_attention(pool):
    """The indexer loss computed in backward equals the one in forward, or the layer is not cut."""
    overrides = {
        "moe_layer_freq": 1,
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
    }
    layout = {"overrides": overrides, "num_microbatches": 1, "micro_batch_size": 2, "ep": 2, "etp": 1}
    off, on = (
        pool.run(f"{__name__}:whole_step", 2, switches=switches, **layout)
        for switches in ({}, HALVES_OF_ATTENTION)
    )
    for before, after in zip(off, on, strict=True):
        assert losses_of(after) == pytest.approx(losses_of(before), rel=1e-6)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)


@pytest.mark.releases(">=0.14")
def test_moved_experts_beside_stock(pool):
    runs = {name: RUNS[name] for name in ("shared expert", "layer recomputed")}
    for rank in pool.run(f"{__name__}:balanced", 2, runs=runs):
        for name, result in rank.items():
            moe.assert_same(result["ours"], result["theirs"])
            assert len(result["plans"]) == 2 * (2 if name == "layer recomputed" else 1)
            assert any(result["plans"])


@pytest.mark.releases(">=0.14")
@pytest.mark.parametrize("name", STEPS)
def test_fb_overlap_beside_stock(pool, name):
    ranks, layout, microbatches, overrides = STEPS[name]
    off, on = (
        pool.run(
            f"{__name__}:whole_step",
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
        assert losses_of(after) == pytest.approx(losses_of(before), rel=1e-6)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
    assert sum(rank["launched"] for rank in on) > 0


WHOLE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTED = {"layers": WHOLE, "experts": RUNS["layer recomputed"]}


@pytest.mark.releases(">=0.14")
@pytest.mark.parametrize("recomputed", RECOMPUTED.values(), ids=list(RECOMPUTED))
@pytest.mark.parametrize("name", ["PP1", "PP2 x VPP2"])
def test_fb_overlap_recomputes(pool, name, recomputed):
    """Results equal pairs without recomputation bit for bit, and the dispatch is sent again."""
    ranks, layout, microbatches, overrides = STEPS[name]
    kept, ours = (
        pool.run(
            f"{__name__}:whole_step",
            ranks,
            switches={"moe_fb_overlap": True},
            overrides={**overrides, **what},
            num_microbatches=microbatches,
            micro_batch_size=1,
            ep=2,
            etp=1,
            **layout,
        )
        for what in ({}, recomputed)
    )
    for before, after in zip(kept, ours, strict=True):
        assert after["losses"] == before["losses"]
        assert after["gradients"].keys() == before["gradients"].keys()
        assert all(
            torch.equal(each, before["gradients"][weight]) for weight, each in after["gradients"].items()
        )
        assert after["launched"] * 6 == before["launched"] * 8


@pytest.mark.releases(">=0.14")
def test_fb_overlap_recomputes_in_bubbles(pool):
    """Results are equal bit for bit, with the same transfers at other times."""
    ranks, layout, microbatches, overrides = STEPS["PP2 x VPP2"]
    in_place, ahead = (
        pool.run(
            f"{__name__}:whole_step",
            ranks,
            switches={"moe_fb_overlap": True, **switches},
            overrides={**overrides, **WHOLE},
            num_microbatches=microbatches,
            micro_batch_size=1,
            ep=2,
            etp=1,
            **layout,
        )
        for switches in ({}, {"recompute_in_bubble": True})
    )
    for before, after in zip(in_place, ahead, strict=True):
        assert after["losses"] == before["losses"]
        assert all(
            torch.equal(each, before["gradients"][weight]) for weight, each in after["gradients"].items()
        )
        assert after["launched"] == before["launched"]
        assert after["ahead"] > 0 == before["ahead"]


@pytest.mark.releases(">=0.14")
@pytest.mark.parametrize("recomputed", [{}, WHOLE], ids=["", "recomputed"])
def test_fb_overlap_moves_experts(pool, recomputed):
    """Results match pairs without moved experts."""
    ranks, layout, microbatches, overrides = STEPS["PP2 x VPP2"]
    without, moved = (
        pool.run(
            f"{__name__}:whole_step",
            ranks,
            switches={"moe_fb_overlap": True, **switches},
            overrides={**overrides, **recomputed},
            num_microbatches=microbatches,
            micro_batch_size=1,
            ep=2,
            etp=1,
            **layout,
        )
        for switches in ({}, ALWAYS)
    )
    for before, after in zip(without, moved, strict=True):
        assert losses_of(after) == pytest.approx(losses_of(before), rel=1e-6)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
        assert after["planned"]


@pytest.mark.releases(">=0.12.1")
def test_a_step_with_fused_permutation(pool):
    (stock,) = pool.run(f"{__name__}:permutations", 1, switches={}, overrides=EXPERTS)
    on = {"moe_permute_fusion": True}
    (fused,) = pool.run(f"{__name__}:permutations", 1, switches=on, overrides={**EXPERTS, **on})
    assert fused["losses"] == stock["losses"]
    assert_same_gradients(fused["gradients"], stock["gradients"], rtol=1e-6)
    assert stock["calls"] == {"permute": 0, "unpermute": 0, "sort_chunks": 0}
    assert fused["calls"] == {"permute": 1, "unpermute": 1, "sort_chunks": 2}


@pytest.mark.releases(">=0.12.1")
def test_layers_of_grouped_experts(pool):
    for built in pool.run(f"{GROUPED}:layers", 2, ep=2, switches=DSA):
        assert built == ("GroupedExperts", "SequentialMLP")


@pytest.mark.releases(">=0.12.1")
def test_state_dicts_of_grouped_experts(pool):
    pool.run(f"{GROUPED}:state_dicts", 1, switches=DSA)


@pytest.mark.releases(">=0.12.1")
@pytest.mark.skipif(Version("0.16") <= RELEASE, reason="optimizer state is not saved in flat pieces")
def test_optimizer_state_in_flat_pieces(pool):
    pool.run(f"{GROUPED}:flat_pieces", 2, ep=2, switches=DSA)


# -- functions that the ranks run -----------------------------------------------------------------


def overlapped(runs: Mapping[str, Mapping[str, Any]], switch: Mapping[str, Any] = SWITCH) -> dict[str, Any]:
    """Run two microbatches with overlapped all-to-alls; add the number of launched transfers.

    Args:
        runs: configuration overrides by run name.
        switch: switches to enable.
    """
    results: dict[str, Any] = {}
    for name, pair in _beside_stock(switch, runs, moe.transfers).items():
        results[name] = {**pair, "launched": pair["watched"].count("launch")}
    return results


def balanced(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Run two microbatches with hot experts moved; add the plans."""
    results: dict[str, Any] = {}
    for name, pair in _beside_stock(ALWAYS, runs, watched).items():
        results[name] = {**pair, "plans": pair["watched"]["plans"]}
    return results


def _beside_stock(
    switches: Mapping[str, Any],
    runs: Mapping[str, Mapping[str, Any]],
    watch: Callable[[], AbstractContextManager[Any]],
) -> dict[str, dict[str, Any]]:
    import mindspeed_dsa

    mindspeed_dsa.enable()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    theirs = {name: _train(overrides) for name, overrides in runs.items()}
    mindspeed_dsa.disable()
    mindspeed_dsa.enable(**switches)
    results: dict[str, dict[str, Any]] = {}
    for name, overrides in runs.items():
        with watch() as seen:
            ours = _train(overrides)
        results[name] = {"ours": ours, "theirs": theirs[name], "watched": seen}
    return results


def _train(overrides: Mapping[str, Any]) -> dict[str, Any]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": moe.HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": 16,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "bias_activation_fusion": False,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    built = moe.layer(TransformerConfig(**{**values, **overrides}))
    return moe.train(built, [moe.tokens(6, seed=10 * dist.get_rank() + index) for index in range(2)])


def whole_step(overrides: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
    """Run a training step of the tiny model; add launched transfers, plans and halves."""
    with moe.transfers() as events, watched() as plans, counted(Stages, "attend") as halves:
        if Version("0.16") > RELEASE:
            overrides = {**EXPERTS, "expert_model_parallel_size": arguments["ep"], **overrides}
            result = one_step(overrides=overrides, **arguments)
        else:
            result = model.run(overrides=overrides, **arguments)
    context = running("recompute-ahead")
    ahead = context.state(Ahead).recomputed["ahead"] if context else 0
    return {
        **result,
        "launched": events.count("launch"),
        "planned": any(plans["plans"]),
        "ahead": ahead,
        "halves": halves["attend"],
    }


def permutations(overrides: Mapping[str, Any], **step: Any) -> dict[str, Any]:
    """Run a training step, and count the permutation calls that reach our operator."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from mindspeed_dsa.features.moe.permute_fusion import permutation

    # Releases with a DSA spec select its modules with this field.
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    local = {"transformer_impl": "local"} if "transformer_impl" in fields else {}
    with counted(permutation, "permute", "unpermute", "sort_chunks") as calls:
        result = one_step(overrides={**overrides, **local}, **step)
    return {**result, "calls": dict(calls)}
