"""Layers that share a selection have the same gradients in every layout and with every recomputation."""

from __future__ import annotations

import itertools

import pytest
import torch
from packaging.specifiers import SpecifierSet

from mindspeed_dsa.patches import versions
from tests.support import memory_events as events
from tests.support.model import assert_same_gradients, put_together
from tests.support.releases import FULL_HERE

pytestmark = pytest.mark.releases(">=0.12.1", quick=True)

STEP = "tests.matrix.sharing_steps:step"
FUSED = {"use_fused_dsa": True}
SWAPPED = {**FUSED, "swap_attention": True, "swap_attention_min_bytes": 0}
ON_TWO = {**FUSED, "context_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
GROUPS = {**FULL, "recompute_num_layers": 2}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
HALF = {"dsa_indexer_topk_freq": 2}
QUARTER = {"dsa_indexer_topk_freq": 4}
GLM = {"dsa_indexer_topk_freq": 4, "dsa_indexer_skip_topk_offset": 3}
GLM_STAGES = {**GLM, "num_layers_in_first_pipeline_stage": 6}
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.1}


def one_process(pool, overrides, switches=None, seed=0):
    (result,) = pool.baseline(STEP, 1, switches=switches, overrides=overrides, num_microbatches=4, seed=seed)
    return result


def by_megatrons_functions(pool, overrides):
    """Return a step through Megatron's functions without a score near zero, and the seed of its token ids.

    The ReLU of a score within rounding of zero (1e-6 here) may be open in one computation and closed in
    another, whose gradients then differ by what the score contributes. One in 300,000 is that near.
    """
    for seed in range(50):
        result = one_process(pool, overrides, seed=seed)
        # Before 0.16 Megatron has no indexer: both computations run on our operators.
        assert (result["nearest"] is None) == (versions.of_megatron() in SpecifierSet("<0.16"))
        if result["nearest"] is None or result["nearest"] > 1e-5:
            return result, seed
    raise AssertionError("each of 50 batches has a score within 1e-5 of zero")


def layout(pool, ranks, overrides, switches=None, **sizes):
    results = pool.run(STEP, ranks, switches=switches, overrides=overrides, num_microbatches=4, **sizes)
    of_all = {
        "selected": sum(result["selected"] for result in results),
        "ahead": sum(result["ahead"] for result in results),
    }
    if sizes.get("cp", 1) > 1:  # losses are sums over a rank's own rows, gradients are summed over ranks
        return {**results[0], **of_all, "losses": []}
    return {**results[-1], **of_all, "gradients": put_together(results)}


def same(result, expected, rtol=1e-4):
    if result["losses"]:
        torch.testing.assert_close(
            torch.tensor(result["losses"]), torch.tensor(expected["losses"]), rtol=1e-5, atol=0
        )
    assert sum(bool(gradient.any()) for gradient in expected["gradients"].values()) > 50
    assert_same_gradients(result["gradients"], expected["gradients"], rtol)


def indexers(result):
    """Return the numbers of the decoder layers with an indexer, from 1."""
    names = [name.split(".") for name in result["gradients"] if name.endswith("indexer.linear_wk.weight")]
    return sorted(int(parts[2]) + 1 for parts in names if parts[0] == "decoder")


@pytest.mark.parametrize(
    ("overrides", "layers"),
    [
        pytest.param(HALF, [1, 3, 5, 7], marks=FULL_HERE),
        pytest.param(QUARTER, [1, 5], marks=FULL_HERE),
        (GLM, [1, 2, 3, 7]),
        ({"dsa_indexer_topk_pattern": "FSSCSCCS"}, [1, 4, 6, 7]),
    ],
    ids=["half", "quarter", "GLM-5.2", "pattern"],
)
def test_fused_attention_has_the_values_of_megatrons_functions(pool, overrides, layers):
    expected, seed = by_megatrons_functions(pool, overrides)
    result = one_process(pool, overrides, FUSED, seed)
    assert indexers(expected) == indexers(result) == layers
    same(result, expected)
    assert result["selected"] == 4 * len(layers)
    assert result["left"] is None


IN_STAGES = {
    "PP2": (QUARTER, {"pp": 2}),
    "PP2 x VPP2": (HALF, {"pp": 2, "vpp": 2}),
    "GLM-5.2 on PP2": (GLM_STAGES, {"pp": 2}),
}
RECOMPUTED = {"full": FULL, "groups": GROUPS, "block": BLOCK, "core": CORE}
KERNELS = {"Megatron's functions": {}, "fused": FUSED}
QUICK = {
    ("PP2", "full", "Megatron's functions"),
    ("PP2 x VPP2", "block", "fused"),
}
QUICK_ELSEWHERE = {("PP2 x VPP2", "groups", "fused"), ("GLM-5.2 on PP2", "core", "fused")}


@pytest.mark.parametrize(
    ("sharing", "sizes", "recompute", "switches"),
    [
        pytest.param(
            *IN_STAGES[stages],
            RECOMPUTED[recompute],
            KERNELS[kernels],
            id=f"{stages}, {recompute}, {kernels}",
            marks=()
            if (stages, recompute, kernels) in QUICK
            else FULL_HERE
            if (stages, recompute, kernels) in QUICK_ELSEWHERE
            else pytest.mark.full,
        )
        for stages, recompute, kernels in itertools.product(IN_STAGES, RECOMPUTED, KERNELS)
    ],
)
def test_recomputed_layers_read_their_own_microbatchs_selection(pool, sharing, sizes, recompute, switches):
    alone = {name: value for name, value in sharing.items() if name.startswith("dsa")}
    expected = one_process(pool, alone, switches)
    result = layout(pool, 2, {**sharing, **recompute}, switches, **sizes)
    same(result, expected)
    assert result["selected"] > expected["selected"], "nothing was recomputed"


@pytest.mark.releases(">=0.12.1")
@pytest.mark.parametrize("switches", [{}, FUSED], ids=["Megatron's functions", "fused"])
@pytest.mark.parametrize("sharing", [HALF, {**HALF, "dsa_indexer_share_for_mtp": True}], ids=["rule", "MTP"])
def test_multi_token_prediction_selects_for_itself(pool, switches, sharing):
    expected = one_process(pool, {**sharing, **MTP}, switches)
    switches = {**switches, "mtp_recompute": True}  # required by released cores; the flags would enable it
    result = one_process(pool, {**sharing, **MTP, **FULL}, switches)
    same(result, expected)
    if str(versions.of_megatron()) in SpecifierSet("<0.14"):  # these recompute only decoder layers
        assert expected["selected"] < result["selected"] < 2 * expected["selected"]
    else:
        assert result["selected"] == 2 * expected["selected"]


@pytest.mark.releases(">=0.19", quick=True)
@pytest.mark.parametrize("switches", [{}, FUSED], ids=["Megatron's functions", "fused"])
def test_a_repeated_layer_of_multi_token_prediction_selects_once(pool, switches):
    repeated = {**HALF, **MTP, "mtp_use_repeated_layer": True, "dsa_indexer_share_for_mtp": True}
    expected = one_process(pool, repeated, switches)
    assert expected["selected"] == 4 * (4 + 1)
    same(one_process(pool, {**repeated, **FULL}, {**switches, "mtp_recompute": True}), expected)


@pytest.mark.releases(">=0.12.1")
@pytest.mark.parametrize(
    ("switches", "overrides", "sizes", "event"),
    [
        ({}, {}, {"tp": 2}, ""),
        (FUSED, CORE, {"tp": 2}, ""),
        (ON_TWO, {}, {"cp": 2}, ""),
        (ON_TWO, CORE, {"cp": 2}, ""),
        ({**FUSED, "recompute_in_advance": True}, FULL, {"pp": 2, "vpp": 2}, "ahead"),
        ({**FUSED, "recompute_in_bubble": True}, FULL, {"pp": 2, "vpp": 2}, "ahead"),
        (SWAPPED, {}, {"pp": 2}, events.EVENTS["swap-attention"]),
    ],
    ids=["TP2", "TP2, core", "CP2", "CP2, core", "ahead", "bubble", "swapped"],
)
def test_layouts(pool, switches, overrides, sizes, event):
    expected, seed = by_megatrons_functions(pool, HALF)
    result = layout(pool, 2, {**HALF, **overrides}, switches, seed=seed, **sizes)
    same(result, expected)
    assert not event or result["ahead"] or result["counts"][event]


@pytest.mark.releases(">=0.16")
@pytest.mark.parametrize("overrides", [{}, CORE], ids=["plain", "core"])
def test_second_stream_and_compiled_regions(pool, overrides):
    """Sharing layers have no indexer for the second stream, and the same prolog as other layers."""
    expected = one_process(pool, HALF, FUSED)
    switches = {**FUSED, "two_streams": True, "compile_regions": True}
    result = one_process(pool, {**HALF, **overrides}, switches)
    same(result, expected)
    assert any(region.startswith("prolog") for region in result["compiled"])
    # A selecting layer's projections and an MoE layer's shared expert, four of each, in each microbatch; and
    # core attention, where it is recomputed, leaves them alone.
    assert result["counts"][events.BESIDE] == 4 * (4 + 4)


BUBBLES = {"recompute_in_bubble": True}


@pytest.mark.releases(">=0.14")
@pytest.mark.parametrize(
    ("recompute", "sharing", "switches", "sizes"),
    [
        (CORE, HALF, {}, {}),
        (FULL, QUARTER, {}, {}),
        pytest.param(BLOCK, GLM, {}, {}, marks=pytest.mark.full),
        pytest.param(FULL, HALF, BUBBLES, {"pp": 2, "vpp": 2}, marks=pytest.mark.full),
        pytest.param(BLOCK, HALF, {}, {"pp": 2, "vpp": 2}, marks=pytest.mark.full),
        pytest.param(FULL, {**GLM, **MTP, "mtp_num_layers": 1}, {}, {}, marks=pytest.mark.full),
    ],
    ids=["core", "full", "block, GLM-5.2", "PP2 x VPP2, full in bubbles", "PP2 x VPP2, block", "full, MTP"],
)
def test_pairs_of_forward_and_backward(pool, recompute, sharing, switches, sizes):
    """The schedule of pairs runs layers one by one, during another microbatch's backward."""
    ranks = 2 * sizes.get("pp", 1)
    paired = {**FUSED, "moe_fb_overlap": True, **switches}
    expected = layout(pool, ranks, sharing, FUSED, ep=2, **sizes)
    result = layout(pool, ranks, {**sharing, **recompute}, paired, ep=2, **sizes)
    same(result, expected)
    assert result["counts"][events.STARTED] > expected["counts"].get(events.STARTED, 0)
    assert result["selected"] > expected["selected"], "nothing was recomputed"
    assert bool(result["ahead"]) == bool(switches)


@pytest.mark.releases(">=0.19")
def test_megatrons_own_holder_gives_another_microbatchs_selection(pool):
    """The fault that this feature repairs: losses are right, and gradients are wrong."""
    expected = one_process(pool, QUARTER)
    result = layout(pool, 2, {**QUARTER, **FULL}, pp=2, repaired=False)
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    wrong = {
        name: float((gradient - expected["gradients"][name]).norm() / expected["gradients"][name].norm())
        for name, gradient in result["gradients"].items()
        if expected["gradients"][name].any()
    }
    assert max(wrong.values()) > 0.1
    assert sum(error > 1e-3 for error in wrong.values()) > 10


@pytest.mark.releases(">=0.16")
@pytest.mark.parametrize(("ranks", "sizes"), [(2, {"pp": 2}), (2, {"cp": 2})], ids=["PP2", "CP2"])
@pytest.mark.parametrize("overrides", [{}, FULL], ids=["plain", "full"])
def test_packed_documents(pool, ranks, sizes, overrides):
    step = "tests.features.attention.packs.documents:scripted_step"
    shared = {**HALF, "dsa_indexer_n_heads": 16}
    (alone,) = pool.run(step, 1, alone=True, from_tokens=True, overrides=shared)
    packed = pool.run(step, ranks, from_tokens=True, overrides={**shared, **overrides}, **sizes)
    packed = packed[:1] if "cp" in sizes else packed
    assert_same_gradients(put_together(packed), alone["gradients"], 2e-5)
