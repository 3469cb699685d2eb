"""Recomputed norms: the same training, and memory savings as in the formula."""

from __future__ import annotations

import pytest
import torch

from tests.features.memory.recompute_activation_function.test_recompute_activation import (
    CASES,
    LAYERS,
    TOKENS,
    assert_same,
    run,
)
from tests.features.memory.recompute_cases import EXPERTS, PLAIN
from tests.support.model import assert_same_gradients, losses_of

ON = {"recompute_norm": True}
CHECKED = {**ON, "recompute_verify": True}
BOTH = {**CHECKED, "recompute_activation_function": True}
LAYER_NORM = {"normalization": "LayerNorm"}
HIDDEN = 32


@pytest.mark.parametrize("switches", [CHECKED, BOTH], ids=["norms", "norms and activations"])
@pytest.mark.parametrize(
    "overrides", [pytest.param(PLAIN, marks=pytest.mark.full), EXPERTS], ids=["MLP", "experts"]
)
def test_training_is_the_same_bit_for_bit(pool, overrides, switches):
    """LayerNorm is one operation; the test below covers RMSNorm on CPUs."""
    overrides = {**overrides, **LAYER_NORM}
    off = run(pool, "train", switches={}, overrides=overrides)
    on = run(pool, "train", switches=switches, overrides=overrides)
    assert_same(off, on)
    assert on[0]["restored"] == 0
    if switches is CHECKED:
        assert on[0]["discarded"] == 3 * LAYERS * 2


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        pytest.param(1, {"mtp": True}, marks=pytest.mark.full),
        pytest.param(2, {"tp": 2}, marks=pytest.mark.full),
        (2, {"pp": 2}),
        pytest.param(4, {"pp": 4, "vpp": 2, "num_microbatches": 8}, marks=pytest.mark.full),
    ],
    ids=("one process", "MTP", "TP2+SP", "PP2", "PP4 x VPP2"),
)
def test_rms_norm_of_several_operations_is_the_same_but_for_rounding(pool, world_size, arguments):
    # The gradient of the norm's input is a sum of three terms, added in another order. Losses are
    # bit-identical.
    arguments["overrides"] = {"num_layers": arguments.get("pp", 1) * (arguments.get("vpp") or 2)}
    off = run(pool, "train", world_size, switches={}, **arguments)
    on = run(pool, "train", world_size, switches=CHECKED, **arguments)
    for before, after in zip(off, on, strict=True):
        assert losses_of(before) == losses_of(after)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
        assert after["discarded"] > 0


@pytest.mark.full
def test_frozen_norms(pool):
    arguments = {"overrides": {**PLAIN, **LAYER_NORM}, "frozen": "layernorm"}
    assert_same(
        run(pool, "train", switches={}, **arguments), run(pool, "train", switches=CHECKED, **arguments)
    )


@pytest.mark.full
def test_norms_learn_where_their_input_needs_no_gradient(pool):
    """A norm whose input needs no gradient is not recomputed, and its weight still learns."""
    arguments = {"overrides": {**PLAIN, **LAYER_NORM}, "frozen": "embedding"}
    off = run(pool, "train", switches={}, **arguments)
    on = run(pool, "train", switches=CHECKED, **arguments)
    assert_same(off, on)
    assert on[0]["discarded"] == 3 * (2 * LAYERS - 1)
    assert on[0]["gradients"]["0.decoder.layers.0.input_layernorm.weight"].any()


@pytest.mark.parametrize(
    ("norm", "floats", "per_token"),
    [("LayerNorm", HIDDEN, 2), pytest.param("RMSNorm", 2 * HIDDEN, 1, marks=pytest.mark.full)],
)
def test_the_memory_of_norms_goes(pool, norm, floats, per_token):
    # Output, mean and reciprocal deviation; RMSNorm on the CPU also saves intermediate results.
    overrides = {**PLAIN, "normalization": norm}
    (off,) = run(pool, "kept_bytes", switches={}, overrides=overrides)
    (on,) = run(pool, "kept_bytes", switches=ON, overrides=overrides)
    saved = off["forward"] - on["forward"]
    assert saved == pytest.approx(2 * LAYERS * TOKENS * (floats + per_token) * 4, rel=0.02)


def test_nothing_is_discarded_without_gradients(pool):
    (counts,) = run(pool, "without_gradients", switches=BOTH)
    assert counts == {"discarded": 0, "restored": 0}


def test_a_wrong_recomputation_is_noticed(pool):
    (error,) = pool.run(
        "tests.support.model:error_of", 1, case=f"{CASES}:changed_norm_weight", switches=CHECKED
    )
    assert "norm of layer 1" in error
    assert "recomputed values differ" in error


@pytest.mark.full
def test_megatrons_own_modules_are_verified_too(pool):
    # Without Transformer Engine, Megatron's layernorm module does not even run.
    megatrons = {
        **PLAIN,
        **LAYER_NORM,
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm"],
    }
    off = run(pool, "train", switches={}, overrides={**PLAIN, **LAYER_NORM})
    on = run(pool, "train", switches={"recompute_verify": True}, overrides=megatrons)
    assert_same(off, on)
    assert on[0]["discarded"] == 3 * LAYERS * 2
    arguments = {"case": f"{CASES}:changed_norm_weight", "overrides": {**megatrons, **PLAIN}}
    (error,) = pool.run("tests.support.model:error_of", 1, switches={"recompute_verify": True}, **arguments)
    assert "recomputed values differ" in error


def test_megatrons_own_module_trains_without_transformer_engine(pool):
    """The module name is enough: Megatron's checkpoint needs Transformer Engine, ours does not."""
    named = {"recompute_modules": ["layernorm"]}
    off = run(pool, "train", switches={}, overrides={**EXPERTS, **LAYER_NORM})
    own = {**EXPERTS, **LAYER_NORM, "recompute_granularity": "selective", **named}
    on = run(pool, "train", switches=named, overrides=own)
    assert_same(off, on)
    assert on[0]["discarded"] == 3 * LAYERS * 2


@pytest.mark.full
def test_random_states_of_a_norm_are_not_touched(pool):
    (on,) = run(pool, "train", switches=CHECKED, overrides={**PLAIN, **LAYER_NORM})
    (off,) = run(pool, "train", switches={}, overrides={**PLAIN, **LAYER_NORM})
    assert torch.equal(on["random state"], off["random state"])
    assert on["restored"] == 0
