"""Attention's saved tensors on the host: bit-identical training, and memory savings equal to the copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.features.memory.recompute_cases import EXPERTS, PLAIN
from tests.support.model import losses_of

CASES = "tests.features.memory.swap_attention.counted_copies"
ON = {"swap_attention": True, "swap_attention_min_bytes": 0}
ALL = {**ON, "swap_modules": "input_norm,self_attention,post_attention_norm"}
FUSED = {"use_fused_dsa": True}
LAYERS = 2
HIDDEN = 32
HEADS = 4
LENGTH = 20
TOKENS = 4 * LENGTH  # tokens of `kept_bytes`


def run(pool: Any, case: str, world_size: int = 1, **arguments: Any) -> list[Any]:
    result: list[Any] = pool.run(f"{CASES}:{case}", world_size, **arguments)
    return result


def both(
    pool: Any, world_size: int = 1, swap: Any = ON, switches: Any = None, **arguments: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run the same job without and with swapping, both with ``switches``."""
    off = run(pool, "train", world_size, switches=switches or {}, **arguments)
    return off, run(pool, "train", world_size, switches={**(switches or {}), **swap}, **arguments)


def assert_same(off: list[dict[str, Any]], on: list[dict[str, Any]]) -> None:
    """Check losses and gradients bit for bit, and that all copies have ended."""
    for before, after in zip(off, on, strict=True):
        assert losses_of(before) == losses_of(after)
        assert_same_gradients(before["gradients"], after["gradients"])
        assert before["out"] == before["back"] == 0
        assert after["out"] > 0
        # Some tensors need not come back: other code has kept them, or no gradient needs them.
        assert after["out"] / 2 < after["back"] <= after["out"]
        assert after["in use"] == 0
    assert any(gradient.any() for rank in off for gradient in rank["gradients"].values())


def assert_same_gradients(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    assert before.keys() == after.keys()
    for name, gradient in before.items():
        assert torch.equal(after[name], gradient), name


CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
UP = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "layernorm"]}
UP_ALONE = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn", "mla_up_proj"]}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
OWN = {"recompute_activation_function": True, "recompute_norm": True, "recompute_verify": True}


@pytest.mark.parametrize(
    ("overrides", "switches", "swap"),
    [
        pytest.param(PLAIN, {}, ALL, marks=pytest.mark.full),
        pytest.param(EXPERTS, OWN, ALL, marks=pytest.mark.full),
        pytest.param({}, {}, ON, marks=pytest.mark.full),
        ({}, FUSED, ALL),
        pytest.param({**PLAIN, **MLP}, {}, ON, marks=pytest.mark.full),
        pytest.param(
            {**PLAIN, "attention_dropout": 0.2, "hidden_dropout": 0.1, "add_bias_linear": True},
            {},
            ALL,
            marks=pytest.mark.full,
        ),
        pytest.param({**PLAIN, **CORE}, {}, ON, marks=pytest.mark.full),
        pytest.param({**PLAIN, **BLOCK}, {}, ON, marks=pytest.mark.full),
        pytest.param({**CORE}, FUSED, ON, marks=pytest.mark.full),
        pytest.param({**MOE}, {}, ON, marks=pytest.mark.full),
        pytest.param({**MOE}, {**FUSED, **OWN}, ALL, marks=pytest.mark.full),
        pytest.param({}, OWN, ALL, marks=pytest.mark.full),
        pytest.param({**UP}, {"recompute_verify": True}, ALL, marks=pytest.mark.full),
    ],
    ids=(
        "MLP, all modules",
        "experts, recomputed norms and activations",
        "MLA, DSA",
        "fused DSA, all modules",
        "MLP recomputed",
        "dropout, biases",
        "core attention recomputed",
        "first layer recomputed in full",
        "fused DSA, core attention recomputed",
        "experts, up-projection and core attention recomputed",
        "fused DSA, all of these recomputed",
        "DSA, recomputed norms and activations",
        "up-projection and norms recomputed by Megatron's modules",
    ),
)
def test_training_is_the_same_bit_for_bit(pool, overrides, switches, swap):
    assert_same(*both(pool, overrides=overrides, switches=switches, swap=swap))


@pytest.mark.parametrize(
    ("world_size", "overrides", "arguments"),
    [
        (2, {}, {"tp": 2}),
        pytest.param(2, PLAIN, {"pp": 2}, marks=pytest.mark.full),
        pytest.param(1, {}, {"mtp": True}, marks=pytest.mark.full),
        pytest.param(2, {}, {"pp": 2}, marks=pytest.mark.full),
        pytest.param(2, PLAIN, {"tp": 2}, marks=pytest.mark.full),
        pytest.param(2, {}, {"pp": 2, "vpp": 2, "num_microbatches": 4}, marks=pytest.mark.full),
        pytest.param(4, {}, {"pp": 4, "vpp": 2, "num_microbatches": 8}, marks=pytest.mark.full),
        pytest.param(4, EXPERTS, {"pp": 4, "vpp": 2, "num_microbatches": 8}, marks=pytest.mark.full),
        pytest.param(4, {}, {"tp": 2, "pp": 2, "num_microbatches": 4}, marks=pytest.mark.full),
    ],
    ids=(
        "DSA: TP2+SP",
        "MLP: PP2",
        "DSA: MTP",
        "DSA: PP2",
        "MLP: TP2+SP",
        "DSA: PP2 x VPP2",
        "DSA: PP4 x VPP2",
        "experts: PP4 x VPP2",
        "DSA: TP2+SP x PP2",
    ),
)
def test_layouts_train_the_same_bit_for_bit(pool, world_size, overrides, arguments):
    layers = arguments.get("pp", 1) * (arguments.get("vpp") or 1)
    assert_same(*both(pool, world_size, overrides={**overrides, "num_layers": max(layers, 2)}, **arguments))


@pytest.mark.parametrize(
    "order",
    [
        [0, 1, 2],
        pytest.param([2, 1, 0], marks=pytest.mark.full),
        pytest.param([1, 2, 0], marks=pytest.mark.full),
    ],
)
def test_backwards_in_any_order(pool, order):
    (off,) = run(pool, "in_flight", switches={}, order=[0, 1, 2])
    (on,) = run(pool, "in_flight", switches=ON, order=order)
    for before, after in zip(off, on, strict=True):
        assert_same_gradients(before, after)


@pytest.mark.parametrize(
    ("overrides", "switches", "swap"),
    [
        pytest.param(PLAIN, {}, ON, marks=pytest.mark.full),
        pytest.param(PLAIN, {}, ALL, marks=pytest.mark.full),
        pytest.param(EXPERTS, {"recompute_norm": True}, ALL, marks=pytest.mark.full),
        pytest.param(UP_ALONE, {}, ON, marks=pytest.mark.full),
        ({}, {}, ON),
        pytest.param({}, FUSED, ALL, marks=pytest.mark.full),
    ],
    ids=(
        "attention",
        "attention and norms",
        "beside recomputed norms",
        "beside the up-projection",
        "DSA",
        "fused DSA and norms",
    ),
)
def test_the_device_has_less_by_what_was_copied(pool, overrides, switches, swap):
    (off,) = run(pool, "kept_bytes", switches=switches, overrides=overrides)
    (on,) = run(pool, "kept_bytes", switches={**switches, **swap}, overrides=overrides)
    assert off["back"] == 0
    assert on["back"] > 0
    assert off["forward"] - on["forward"] == pytest.approx(on["back"], rel=0.02)


@pytest.mark.full
@pytest.mark.parametrize(
    ("modules", "of_layer"),
    [
        # The norm's output, the mixed projection, query and key after the rotation, and the output;
        # probabilities of all heads; two cosine and two sine tables; and the mask in bytes.
        (
            "self_attention",
            4 * TOKENS * (7 * HIDDEN + HEADS * LENGTH) + 4 * 4 * LENGTH * HIDDEN // HEADS + LENGTH**2,
        ),
        # per norm: the hidden states, their mean and the inverse of their deviation
        pytest.param("input_norm,post_attention_norm", 2 * 4 * TOKENS * (HIDDEN + 2), marks=pytest.mark.full),
    ],
    ids=("attention", "norms"),
)
def test_bytes_of_multi_head_attention_are_what_the_formula_says(pool, modules, of_layer):
    switches = {**ON, "swap_modules": modules}
    (on,) = run(pool, "kept_bytes", switches=switches, overrides={**PLAIN, "normalization": "LayerNorm"})
    assert on["back"] == LAYERS * of_layer


@pytest.mark.full
def test_the_peak_is_lower_with_many_layers(pool):
    """When backward begins, all layers but two are on the host, and two at most are on the device."""
    overrides = {**PLAIN, "num_layers": 6}
    (off,) = run(pool, "kept_bytes", switches={}, overrides=overrides)
    (on,) = run(pool, "kept_bytes", switches=ON, overrides=overrides)
    assert off["peak"] - on["peak"] >= (6 - 2) / 6 * on["back"] * 0.9


def test_copies_hide_behind_mlps(pool):
    """Memory is freed after the layer's MLP, and copied back before the backward of the MLP above."""
    (events,) = run(pool, "timeline", switches=ON, num_layers=3)
    expected = """
        out 0, attention 0, mlp 0, gone, out 1, attention 1, mlp 1, gone, out 2, attention 2, mlp 2, gone,
        back 2, back 1, backward of mlp 2, backward of attention 2, back 0, backward of mlp 1,
        backward of attention 1, backward of mlp 0, backward of attention 0
    """
    assert events == [event.strip() for event in expected.split(",")]


def test_forwards_without_backward(pool):
    (result,) = run(pool, "without_backward", switches=ON)
    assert result["no_grad"] == result["frozen"] == 0
    assert result["dropped"] > 0
    assert result["held"] > 0
    assert result["left"] == 0


def test_a_layer_of_which_nothing_is_large_enough_is_named(pool):
    (said,) = run(pool, "reported", switches={"swap_attention": True})
    assert len(said) == LAYERS
    assert "layer 1 swaps nothing: the largest storage that could leave has " in said[0]
    assert "fewer than --swap-attention-min-bytes 1048576" in said[0]
    assert run(pool, "reported", switches=ON) == [[]]


@pytest.mark.full
def test_a_second_backward(pool):
    (off,) = run(pool, "twice", switches={})
    (on,) = run(pool, "twice", switches=ON)
    assert_same_gradients(off["first"], on["first"])
    assert_same_gradients(off["second"], on["second"])
    assert on["copies"] == 0, "the bytes are there"
    assert on["left"] == 0


@pytest.mark.parametrize("where", ["attention", pytest.param("mlp", marks=pytest.mark.full)])
def test_an_exception_leaves_nothing_behind(pool, where):
    (off,) = run(pool, "interrupted", switches={}, where=where)
    (on,) = run(pool, "interrupted", switches=ON, where=where)
    assert on["raised"] == where
    assert on["left"] == 0
    assert not on["hooked"]
    assert_same_gradients(off["gradients"], on["gradients"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("switches", "tp"),
    # A measured number of chunks may differ between both runs, and with it the order of sums.
    [({}, 1), pytest.param({"use_ascend_coc": True, "coc_parallel_num": 2}, 2, marks=pytest.mark.full)],
    ids=("Megatron's layers", "overlapped layers"),
)
def test_gradient_accumulation_fusion(pool, switches, tp):
    # Data parallelism reduces in time only if the parameters themselves are marked.
    off = run(pool, "fused_accumulation", tp, switches=switches, tp=tp)
    on = run(pool, "fused_accumulation", tp, switches={**switches, **ON}, tp=tp)
    for before, after in zip(off, on, strict=True):
        assert_same_gradients(before["gradients"], after["gradients"])
        assert all(gradient.any() for name, gradient in after["gradients"].items() if "linear_qkv" in name)


@pytest.mark.parametrize(
    "before",
    [pytest.param({"CPUOffloadEnabled": False}, marks=pytest.mark.full), {}],
    ids=("known", "not known"),
)
def test_transformer_engine_keeps_its_parameters(pool, before):
    (found,) = run(pool, "transformer_engine_switch", switches=ON, **before)
    assert found == {"attention": True, "mlp": before.get("CPUOffloadEnabled"), "left": before}


@pytest.mark.parametrize(
    ("switches", "layout", "world_size", "expected"),
    [
        pytest.param({}, {}, 1, [{1: ("self_attention",), 2: ("self_attention",)}], marks=pytest.mark.full),
        (
            {"swap_modules": "post_attention_norm, input_norm", "swap_attention_num_layers": 1},
            {"pp": 2, "vpp": 2},
            2,
            [{1: ("pre_mlp_layernorm", "input_layernorm")}, {2: ("pre_mlp_layernorm", "input_layernorm")}],
        ),
    ],
    ids=("all layers", "one layer, PP2 x VPP2"),
)
def test_layers_and_modules(pool, switches, layout, world_size, expected):
    layers = run(
        pool, "chosen_layers", world_size, switches={**ON, **switches}, num_layers=2 * world_size, **layout
    )
    assert layers == expected


@pytest.mark.full
def test_undo_gives_the_model_back(pool):
    (off,) = run(pool, "after_undo", switches={})
    (on,) = run(pool, "after_undo", switches=ON)
    assert on["copies"] == 0
    assert_same_gradients(off["gradients"], on["gradients"])


@pytest.mark.parametrize(
    "beside",
    [pytest.param({}, marks=pytest.mark.full), {"recompute_norm": True}],
    ids=("alone", "beside recompute-outputs"),
)
def test_every_row_is_applied_and_undone(pool, beside):
    # recompute-outputs replaces Megatron's checkpoint, so there is nothing to patch in Megatron's own.
    switches = {**ON, **beside}
    (result,) = pool.run("tests.features.dsa.parts_of_dsa:arm_and_undo", 1, switches=switches)
    ours = [site for site in result["sites"] if any("swap-attention" in name for name in site["features"])]
    assert len(ours) == (5 if beside else 6)
    assert {site["state"] for site in ours} == {"applied"}
    assert "foreign" not in {site["state"] for site in result["sites"]}
    assert result["still changed after disable"] == []
