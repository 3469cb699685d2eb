"""Recomputed activation functions: bit-identical training, and memory savings as in the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.features.memory.recompute_cases import EXPERTS, PLAIN
from tests.support.model import losses_of

CASES = "tests.features.memory.recompute_cases"
ON = {"recompute_activation_function": True}
CHECKED = {**ON, "recompute_verify": True}
FUSED = {"bias_activation_fusion": True}
UNGATED = {"gated_linear_unit": False}
TOKENS = 4 * 20  # tokens of `kept_bytes`
LAYERS = 2
FFN = 64


def run(pool: Any, case: str, world_size: int = 1, **arguments: Any) -> list[dict[str, Any]]:
    stock = case == "train" and not arguments["switches"]
    run_it = pool.baseline if stock else pool.run
    result: list[dict[str, Any]] = run_it(f"{CASES}:{case}", world_size, **arguments)
    return result


def both(
    pool: Any, world_size: int = 1, **arguments: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    off = run(pool, "train", world_size, switches={}, **arguments)
    return off, run(pool, "train", world_size, switches=CHECKED, **arguments)


def assert_same(off: list[dict[str, Any]], on: list[dict[str, Any]]) -> None:
    """Check losses, gradients and random states of all ranks bit for bit."""
    for before, after in zip(off, on, strict=True):
        assert losses_of(before) == losses_of(after)
        assert before["gradients"].keys() == after["gradients"].keys()
        for name, gradient in before["gradients"].items():
            assert torch.equal(after["gradients"][name], gradient), name
        assert torch.equal(before["random state"], after["random state"])
        assert before["discarded"] == 0
    assert any(gradient.any() for rank in off for gradient in rank["gradients"].values())


@pytest.mark.parametrize(
    ("overrides", "discarded"),
    [
        pytest.param(PLAIN, 2, marks=pytest.mark.full),
        pytest.param({**PLAIN, **FUSED}, 2, marks=pytest.mark.full),
        pytest.param({**PLAIN, **UNGATED, "activation": "gelu"}, 2, marks=pytest.mark.full),
        pytest.param(
            {**PLAIN, **UNGATED, "activation": "gelu", "add_bias_linear": True}, 2, marks=pytest.mark.full
        ),
        pytest.param(
            {**PLAIN, **FUSED, **UNGATED, "activation": "gelu", "add_bias_linear": True},
            2,
            marks=pytest.mark.full,
        ),
        pytest.param({**PLAIN, **FUSED, "add_bias_linear": True}, 2, marks=pytest.mark.full),
        ({**EXPERTS, **FUSED}, 2 * (4 + 1)),
        pytest.param(
            {
                **EXPERTS,
                "moe_apply_probs_on_input": True,
                "moe_router_topk": 1,
                "moe_router_pre_softmax": True,
            },
            2 * (4 + 1),
            marks=pytest.mark.full,
        ),
        ({}, 1 + 4 + 1),
    ],
    ids=(
        "SwiGLU",
        "SwiGLU, fused",
        "GELU",
        "GELU and bias",
        "GELU and bias, fused",
        "SwiGLU and bias, fused",
        "experts, fused",
        "experts, scaled input",
        "DSA",
    ),
)
def test_training_is_the_same_bit_for_bit(pool, overrides, discarded):
    overrides = dict(overrides)
    arguments = {"activation": overrides.pop("activation", "silu"), "overrides": overrides}
    off, on = both(pool, **arguments)
    assert_same(off, on)
    assert on[0]["discarded"] == 3 * discarded, "three microbatches"
    assert on[0]["restored"] == 0, "none of these draws random numbers"


def test_random_states_are_restored_where_the_function_draws(pool):
    arguments = {"overrides": {**PLAIN, **UNGATED}, "activation": "drawing"}
    off, on = both(pool, **arguments)
    assert_same(off, on)
    assert on[0]["restored"] == 2 * 3 * LAYERS, "set and set back, once a layer and microbatch"


@pytest.mark.parametrize("activation", [pytest.param("identity", marks=pytest.mark.full), "part"])
def test_memory_that_is_not_the_outputs_alone_is_kept(pool, activation):
    off, on = both(pool, overrides={**PLAIN, **UNGATED}, activation=activation)
    assert_same(off, on)
    assert on[0]["discarded"] == 0


@pytest.mark.full
@pytest.mark.parametrize("frozen", ["linear_fc2", "linear_fc1", "embedding"])
def test_frozen_weights(pool, frozen):
    off, on = both(pool, overrides=PLAIN, frozen=frozen)
    assert_same(off, on)
    assert on[0]["discarded"] == 3 * LAYERS


@pytest.mark.full
def test_nothing_is_discarded_where_the_input_needs_no_gradient(pool):
    off, on = both(pool, overrides={**PLAIN, "num_layers": 1}, frozen="weight")
    assert on[0]["discarded"] == off[0]["discarded"] == 0


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        (2, {"tp": 2}),
        pytest.param(2, {"pp": 2}, marks=pytest.mark.full),
        pytest.param(1, {"mtp": True}, marks=pytest.mark.full),
        pytest.param(2, {"pp": 2, "vpp": 2, "num_microbatches": 4}, marks=pytest.mark.full),
        pytest.param(4, {"pp": 4, "vpp": 2, "num_microbatches": 8}, marks=pytest.mark.full),
        pytest.param(4, {"tp": 2, "pp": 2, "num_microbatches": 4}, marks=pytest.mark.full),
    ],
    ids=("TP2+SP", "PP2", "MTP", "PP2 x VPP2", "PP4 x VPP2", "TP2+SP x PP2"),
)
def test_layouts_train_the_same_bit_for_bit(pool, world_size, arguments):
    layers = arguments.get("pp", 1) * (arguments.get("vpp") or 1) * 1
    off, on = both(pool, world_size, overrides={"num_layers": max(layers, 2)}, **arguments)
    assert_same(off, on)
    assert all(rank["discarded"] > 0 for rank in on)


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "activation", "floats"),
    [
        # Floats per token: the product, silu of the gate, and the other half plus its offset, whose product
        # it is.
        (PLAIN, "silu", 3 * FFN),
        ({**PLAIN, **FUSED}, "silu", FFN),
        ({**PLAIN, **UNGATED}, "gelu", FFN),
        # Each token goes to two experts of width 16, which also multiply by the router's probability, and to
        # the shared expert of width 24.
        (EXPERTS, "silu", 2 * 4 * 16 + 3 * 24),
        ({**EXPERTS, **FUSED}, "silu", 2 * 16 + 24),
    ],
    ids=("SwiGLU", "SwiGLU, fused", "GELU", "experts", "experts, fused"),
)
def test_the_memory_of_activations_goes(pool, overrides, activation, floats):
    # Some functions are scripted, and save less after their first calls.
    for _ in range(3):
        (off,) = run(pool, "kept_bytes", switches={}, overrides=overrides, activation=activation)
        (on,) = run(pool, "kept_bytes", switches=ON, overrides=overrides, activation=activation)
    saved = off["forward"] - on["forward"]
    assert saved == pytest.approx(LAYERS * TOKENS * floats * 4, rel=0.02)
    # With two layers, recomputing one layer takes the memory freed in the other. Without fusion the
    # intermediates are freed as well, and so must be the second copy of the output when the function's
    # backward runs.
    lowered = 3.5 * FFN if overrides is PLAIN else 0
    # Peaks of equal runs differ by up to 324 bytes; the smallest activation has 7680 bytes.
    assert on["peak"] <= off["peak"] - TOKENS * lowered * 4 + 1000


@pytest.mark.full
def test_memory_is_freed_in_as_many_layers_as_asked_for(pool):
    (off,) = run(pool, "kept_bytes", switches={}, overrides=PLAIN)
    switches = {**ON, "recompute_activation_function_num_layers": 1}
    (on,) = run(pool, "kept_bytes", switches=switches, overrides=PLAIN)
    assert off["forward"] - on["forward"] == pytest.approx(TOKENS * 3 * FFN * 4, rel=0.02)


def test_a_wrong_recomputation_is_noticed(pool):
    arguments = {"case": f"{CASES}:drift", "by": 1e-6}
    (error,) = pool.run("tests.support.model:error_of", 1, switches=CHECKED, **arguments)
    assert "activation function of layer 1, mlp" in error
    assert "128 of 2560 recomputed values differ" in error  # the last position of both sequences
    (error,) = pool.run("tests.support.model:error_of", 1, switches=ON, **arguments)
    assert error == "", "without the switch nobody looks"


def test_grouped_experts_recompute_by_megatrons_own_path(pool):
    (off,) = run(pool, "grouped_experts", switches={})
    (on,) = run(pool, "grouped_experts", switches=CHECKED)
    for counts in ("[3, 0, 2, 4]", "[0, 0, 0, 0]"):
        assert all(torch.equal(a, b) for a, b in zip(off[counts], on[counts], strict=True))
    assert on["discarded [3, 0, 2, 4]"] == 1
    assert not on["own flag"], "set for the time of the forward alone"


def test_nothing_is_discarded_without_gradients(pool):
    (counts,) = run(pool, "without_gradients", switches=CHECKED)
    assert counts == {"discarded": 0, "restored": 0}


def test_undo_gives_the_model_back(pool):
    (result,) = run(pool, "after_undo", switches={**CHECKED, "recompute_norm": True})
    assert result["changed"] == [True, True, True]
    assert result["restored"]
    assert result["discarded"] == 0
    assert result["attributes"] == []
    assert result["flags"] == [False, False]


@pytest.mark.parametrize(
    ("how", "says"),
    [("twice", "a second backward"), ("grad", "torch.autograd.grad and backward(inputs=...)")],
)
def test_what_cannot_be_recomputed_is_told(pool, how, says):
    (error,) = pool.run("tests.support.model:error_of", 1, case=f"{CASES}:misuse", switches=ON, how=how)
    assert "activation function of layer 2, mlp" in error
    assert says in error
