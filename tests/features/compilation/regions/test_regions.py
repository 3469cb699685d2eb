"""Compiled regions: the same training, complete graphs, no recompilation for short microbatches, one
message.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from mindspeed_dsa.features.compilation.regions import prolog
from tests.features.memory.pairs import FEATURES as MEMORY
from tests.support import third_party
from tests.support.memory_events import BESIDE, EVENTS, REGIONS
from tests.support.model import assert_same_gradients

torch = pytest.importorskip("torch")
third_party.or_skip("megatron.core")

CASES = "tests.features.compilation.regions.compiled_steps"
ON = {"compile_regions": True}
FUSED = {"use_fused_dsa": True, "use_dsa_absorb": True}
PROLOG, EPILOG = "prolog of latent attention", "epilog of latent attention"
BY_HEAD, ABSORBED = f"{PROLOG} by head", f"{PROLOG} in absorbed form"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
UP = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
LATENTS = f"{PROLOG}, latents"
BF16 = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
STACKED = {"moe_grouped_gemm": True, "moe_permute_fusion": True}
BESIDE_OTHERS = {
    "fused operators": ({"fused_operators": ["all"]}, {}),
    "fused DSA, absorbed, fused operators": ({**FUSED, "fused_operators": ["all"]}, {}),
    "grouped experts, fused permutation": (STACKED, STACKED),
    "two streams": ({"two_streams": True}, {}),
}
LAYOUTS = {
    "by head": (1, {}, {}, {BY_HEAD}),
    "absorbed": (1, FUSED, {}, {ABSORBED, EPILOG}),
    "by head, TP2+SP": (2, {}, {}, {LATENTS, f"{BY_HEAD}, heads"}),
    "absorbed, TP2+SP": (2, FUSED, {}, {LATENTS, f"{ABSORBED}, heads", EPILOG}),
    "by head, bf16": (1, {}, BF16, {BY_HEAD}),
    "absorbed, layers recomputed": (1, FUSED, FULL, {ABSORBED, EPILOG}),
    "by head, up-projections recomputed": (1, {}, UP, {LATENTS, f"{BY_HEAD}, heads"}),
}


def both(pool, name, **arguments):
    ranks, switches, overrides, expected = LAYOUTS[name]
    arguments = {"tp": ranks, "overrides": overrides, **arguments}
    off = pool.run(f"{CASES}:train", ranks, switches=switches, **arguments)
    on = pool.run(f"{CASES}:train", ranks, switches={**switches, **ON}, timeout_s=900, **arguments)
    return off, on, expected


def check(off, on, expected, rtol):
    for before, after in zip(off, on, strict=True):
        assert not before["counts"][-1]
        torch.testing.assert_close(after["losses"], before["losses"], rtol=rtol, atol=0)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=10 * rtol)
        assert not after["failures"]
        assert after["graph_breaks"] == 0
        # From the second microbatch on, no more graphs are compiled.
        settled = after["counts"][1]
        assert set(settled) == expected
        assert after["counts"][-1] == settled, "the shorter microbatches were compiled anew"
        # At most one more graph, without gradients.
        assert max(after["after evaluation"].values()) <= 2


@pytest.mark.parametrize("name", ["absorbed"])
def test_graphs_are_whole(pool, name):
    check(*both(pool, name, differentiated=False), rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", [each for each in LAYOUTS if "bf16" not in each])
def test_training_is_the_same_and_graphs_are_whole(pool, name):
    check(*both(pool, name), rtol=1e-6)


@pytest.mark.full
def test_bf16(pool):
    check(*both(pool, "by head, bf16"), rtol=2e-3)


@pytest.mark.full
def test_every_memory_feature_changes_no_bit_of_compiled_layers(pool):
    (alone,) = pool.run(f"{CASES}:pair", 1, switches=ON)
    assert alone["counts"][REGIONS] > 0
    for feature, switches in {**MEMORY, "two-streams": {"two_streams": True}}.items():
        (together,) = pool.run(f"{CASES}:pair", 1, switches={**ON, **switches})
        assert together["counts"][REGIONS] > 0, feature
        for what in ("records", "weights", "masters", "moments"):
            assert together[what] == alone[what], f"{feature}: {what} differ"
        for name, event in {**EVENTS, "two-streams": BESIDE}.items():
            assert (event in together["counts"]) == (name == feature), f"{feature}: {event}?"


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(BESIDE_OTHERS))
def test_beside_other_features(pool, name):
    switches, overrides = BESIDE_OTHERS[name]
    off, on = (
        pool.run(f"{CASES}:train", 1, switches={**switches, **each}, overrides=overrides, timeout_s=900)
        for each in ({}, ON)
    )
    torch.testing.assert_close(on[0]["losses"], off[0]["losses"], rtol=2e-6, atol=0)
    assert_same_gradients(on[0]["gradients"], off[0]["gradients"], rtol=2e-5)
    assert not on[0]["failures"]
    assert on[0]["graph_breaks"] == 0
    assert on[0]["counts"][-1]


@pytest.mark.full
def test_generated_code_trains_the_same_and_is_kept_for_the_next_run(pool):
    off, on, expected = both(pool, "absorbed", code=True, deterministic=True)
    check(off, on, expected, rtol=1e-6)
    (again,) = pool.run(
        f"{CASES}:train", 1, switches={**FUSED, **ON}, code=True, deterministic=True, timeout_s=900
    )
    # Graphs come from the cache.
    assert again["cached"] >= len(expected)
    torch.testing.assert_close(again["losses"], on[0]["losses"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("toolchain", "there is no C++ compiler (g++); install g++"),
        pytest.param(
            "compiler",
            "does not compile (NotImplementedError: no code for this graph) and runs as it is",
            marks=pytest.mark.full,
        ),
    ],
)
def test_without_a_compiler_it_runs_as_it_is_and_says_so_once(pool, what, message):
    (off,) = pool.baseline(f"{CASES}:train", 1, switches={})
    (on,) = pool.run(f"{CASES}:train_and_fail", 1, switches=ON, what=what)
    assert torch.equal(off["losses"], on["losses"])
    own = [each for each in on["messages"] if message in each]
    # Once, however many regions there are.
    assert len(own) == 1 == len(set(own))
    assert not any(on["after evaluation"].values())


@pytest.mark.parametrize(("works", "settings"), [(True, {"cpp.vec_isa_ok": True}), (False, {})])
def test_the_first_vector_instructions_alone_are_tried(pool, works, settings):
    assert pool.run(f"{CASES}:tried", 1, works=works) == [(settings, ["avx512 avx512_vnni"])]


@pytest.mark.full
def test_training_after_an_evaluation_in_inference_mode(pool):
    off, on = (
        pool.run(f"{CASES}:train_after_inference", 1, switches={**FUSED, **each}, timeout_s=900)
        for each in ({}, ON)
    )
    torch.testing.assert_close(on[0], off[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("run", [prolog._by_head, prolog._absorbed])
def test_down_projections_that_are_one_product_are_declined(run):
    """Megatron's FusedMLASelfAttention, of --mla-down-proj-fusion, has neither of the two."""
    config = SimpleNamespace(tensor_model_parallel_size=1, q_lora_rank=4)
    layer, regions = SimpleNamespace(config=config, linear_qkv_down_proj=None), mock.Mock()
    assert run(regions, None, layer, torch.ones(2), *[None] * (run is prolog._absorbed)) is None
    regions.declined.assert_called_once_with(prolog.PROLOG, "its down-projections are one product")
