from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest
import torch

import mindspeed_dsa
from mindspeed_dsa.patches import SettingsError
from tests.support.model import assert_same_gradients, put_together

CASES = "tests.features.dsa.fused_cases"
PARTS = (
    "use_dsa_absorb",
    "use_fused_lightning_indexer",
    "use_fused_sparse_flash_attention",
    "use_fused_lightning_indexer_kl_loss",
)
FUSED = {"use_fused_dsa": True}
IN_BACKWARD = {"use_fused_dsa": True, "dsa_fuse_kl_in_backward": True}
IN_FP8 = {"dsa_indexer_precision": "fp8"}
SHORT = {"dsa_indexer_topk": 20}  # at least the sequence length, so every key is selected
DENSE_LOSS = {"dsa_indexer_use_sparse_loss": False}


def step(pool, switches=None, overrides=None, mode="train"):
    (result,) = pool.run(f"{CASES}:one_step", 1, switches=switches, overrides=overrides, mode=mode)
    return result


@pytest.fixture(scope="module")
def stock(pool):
    return {name: step(pool, overrides=overrides) for name, overrides in MODELS.items()}


MODELS = {
    "sparse loss": {},
    "dense loss": DENSE_LOSS,
    "short": SHORT,
    "short, dense loss": SHORT | DENSE_LOSS,
}


def assert_same(ours, theirs, rtol=1e-4):
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    torch.testing.assert_close(ours["tracked"], theirs["tracked"], rtol=1e-4, atol=1e-6)
    assert_same_gradients(ours["gradients"], theirs["gradients"], rtol)


# Single parts and all parts run in every test run; two and three parts in full runs only.
COMBINATIONS = [
    pytest.param(chosen, marks=[pytest.mark.full] if sum(chosen) in (2, 3) else [], id=str(chosen))
    for chosen in itertools.product((False, True), repeat=4)
    if any(chosen)
]


@pytest.mark.parametrize("chosen", COMBINATIONS)
def test_every_combination_of_parts_trains_as_megatron_does(pool, stock, chosen):
    switches = dict(zip(PARTS, chosen, strict=True))
    ours = step(pool, switches)
    assert_same(ours, stock["sparse loss"])
    # Megatron's code runs once per layer for each part that is switched off.
    _, _, attention, kl_loss = chosen
    assert ours["counts"]["unfused_dsa_fn"] == (0 if attention else 2)
    assert ours["counts"]["compute_dsa_indexer_loss"] == (0 if kl_loss else 2)


# A loss formed in backward cannot be dense.
FORMS = [
    *itertools.product((FUSED,), MODELS),
    *(
        pytest.param(
            FUSED | {"use_dsa_absorb": False}, name, marks=() if name == "sparse loss" else pytest.mark.full
        )
        for name in MODELS
    ),
    *(
        pytest.param(
            FUSED | {"use_dsa_absorb": True}, name, marks=() if name == "short" else pytest.mark.full
        )
        for name in MODELS
        if "short" in name
    ),
    *(
        (IN_BACKWARD, name)
        for name, overrides in MODELS.items()
        if not DENSE_LOSS.items() <= overrides.items()
    ),
]


@pytest.mark.parametrize(("switches", "model"), FORMS, ids=str)
def test_all_parts_on_every_form_of_the_loss(pool, stock, model, switches):
    ours = step(pool, switches, MODELS[model])
    assert_same(ours, stock[model])
    assert ours["counts"]["unfused_dsa_fn"] == ours["counts"]["compute_dsa_indexer_loss"] == 0


@pytest.mark.parametrize(
    ("switches", "by_head"),
    [
        (FUSED, 2),
        pytest.param(FUSED | {"dsa_backend": "cpu", "use_dsa_absorb": "auto"}, 2, marks=pytest.mark.full),
        pytest.param(FUSED | {"dsa_backend": "chunked"}, 0, marks=pytest.mark.full),
        pytest.param(FUSED | {"use_dsa_absorb": True}, 0, marks=pytest.mark.full),
        pytest.param(FUSED | {"use_fused_sparse_flash_attention": False}, 0, marks=pytest.mark.full),
        pytest.param(IN_BACKWARD, 0, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_cpu_attends_by_head_where_that_is_faster(pool, stock, switches, by_head):
    (ours,) = pool.run(f"{CASES}:step_as_long_sequences", 1, switches=switches)
    assert_same(ours, stock["sparse loss"])
    assert ours["by head"] == {"forward": by_head, "backward": by_head}


AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
UP_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
ABSORBED = FUSED | {"use_dsa_absorb": True}


@pytest.mark.parametrize(
    ("switches", "overrides", "passes"),
    [
        pytest.param(ABSORBED, {}, 1, marks=pytest.mark.full),
        (IN_BACKWARD | {"use_dsa_absorb": True}, AGAIN, 2),
        pytest.param(ABSORBED, UP_AGAIN, 1, marks=pytest.mark.full),
        pytest.param(ABSORBED, SHORT, 1, marks=pytest.mark.full),
        pytest.param(ABSORBED, DENSE_LOSS, 1, marks=pytest.mark.full),
        pytest.param(ABSORBED | {"use_fused_sparse_flash_attention": False}, {}, 1, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_queries_in_two_parts_pass_through_megatrons_layer(pool, switches, overrides, passes):
    # As on NPUs, but here the operators join the parts. Key gradients are summed in another order.
    whole = step(pool, switches, overrides)
    (ours,) = pool.run(f"{CASES}:step_in_two_parts", 1, switches=switches, overrides=overrides)
    # Two layers, each as often as attention runs forward.
    assert ours["in two parts"] == [True] * 2 * passes
    assert ours["loss"] == whole["loss"]
    torch.testing.assert_close(ours["tracked"], whole["tracked"], rtol=0, atol=0)
    assert_same_gradients(ours["gradients"], whole["gradients"], 1e-5)


def calls(pool, mode, switches=FUSED, **overrides):
    (result,) = pool.run(f"{CASES}:operator_calls", 1, mode=mode, switches=switches, overrides=overrides)
    return result


@pytest.mark.parametrize(
    ("mode", "switches", "overrides", "expected"),
    [
        ("train", FUSED, {}, (2, 2, 2, 0)),
        ("train", IN_BACKWARD, {}, (2, 2, 0, 0)),
        ("train", FUSED, DENSE_LOSS, (2, 2, 0, 2)),
        ("train", FUSED, SHORT, (0, 0, 0, 2)),
        ("train", FUSED, {"dsa_indexer_loss_coeff": None}, (2, 2, 0, 0)),
        ("eval", FUSED, {}, (2, 2, 0, 0)),
        ("no_grad", FUSED, {}, (2, 2, 0, 0)),
        ("no_grad", FUSED, SHORT, (0, 0, 0, 0)),
    ],
    ids=str,
)
def test_each_operator_runs_where_it_is_wanted(pool, mode, switches, overrides, expected):
    result = calls(pool, mode, switches, **overrides)
    names = ("lightning_indexer", "sparse_flash_attention", "indexer_kl_loss", "dense_indexer_kl_loss")
    assert tuple(result["counts"][name] for name in names) == expected
    assert result["counts"]["unfused_dsa_fn"] == result["counts"]["compute_dsa_indexer_loss"] == 0
    wanted = mode == "train" and overrides.get("dsa_indexer_loss_coeff", 1.0)
    assert (result["tracked"] is not None) == bool(wanted)


@pytest.mark.parametrize(
    ("switches", "overrides", "absorbed"),
    [
        (FUSED, {}, True),
        (FUSED, SHORT, False),
        (FUSED, {"dsa_indexer_topk": 19}, True),
        pytest.param(FUSED | {"use_dsa_absorb": True}, SHORT, True, marks=pytest.mark.full),
        (FUSED | {"use_dsa_absorb": False}, {}, False),
        pytest.param(
            {"use_fused_sparse_flash_attention": True, "use_dsa_absorb": "auto"},
            {},
            True,
            marks=pytest.mark.full,
        ),
        ({"use_fused_sparse_flash_attention": True, "use_dsa_absorb": "auto"}, SHORT, False),
        # Megatron's own attention masks all pairs in either form.
        pytest.param(
            FUSED | {"use_fused_sparse_flash_attention": False}, SHORT, True, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_sequences_that_select_every_key_attend_by_head(pool, switches, overrides, absorbed):
    assert calls(pool, "train", switches, **overrides)["forms"] == [absorbed] * 2


def test_without_a_loss_the_indexer_gets_zeros_and_all_else_what_megatron_gives(pool):
    no_loss = {"dsa_indexer_loss_coeff": 0.0}
    ours, theirs = step(pool, FUSED, no_loss), step(pool, None, no_loss)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    indexer = [gradient for name, gradient in ours["gradients"].items() if "indexer" in name]
    assert len(indexer) == 10
    assert all(gradient is not None and not gradient.any() for gradient in indexer)
    rest = [name for name in theirs["gradients"] if "indexer" not in name]
    assert_same_gradients({n: ours["gradients"][n] for n in rest}, {n: theirs["gradients"][n] for n in rest})


@pytest.mark.parametrize("switches", [pytest.param(FUSED, marks=pytest.mark.full), IN_BACKWARD], ids=str)
def test_mtp_layers(pool, switches):
    (ours,), (theirs,) = (pool.run(f"{CASES}:mtp_step", 1, switches=each) for each in (switches, None))
    assert_same_gradients(ours, theirs)


OTHER_MODELS = [
    {"q_lora_rank": None},
    {"rope_type": "yarn"},
    {"qk_layernorm": False},
    {"normalization": "LayerNorm"},
    {"v_head_dim": 12},
    {"calculate_per_token_loss": True},
]


@pytest.mark.parametrize(
    "overrides",
    [OTHER_MODELS[0], *(pytest.param(each, marks=pytest.mark.full) for each in OTHER_MODELS[1:])],
    ids=str,
)
@pytest.mark.parametrize(
    "switches", [FUSED, pytest.param(IN_BACKWARD, marks=pytest.mark.full)], ids=["forward", "backward"]
)
def test_other_models(pool, overrides, switches):
    run = f"{CASES}:whole_step"
    ours, theirs = (
        pool.run(run, 1, switches=parts, overrides=overrides, num_microbatches=2)[0]["gradients"]
        for parts in (switches, None)
    )
    assert_same_gradients(ours, theirs)


@pytest.mark.full
def test_norms_with_zero_centred_gamma(pool):
    # Such norms double here, and index scores spread so far that Megatron's epsilon in the loss matters.
    run, overrides = f"{CASES}:whole_step", {"layernorm_zero_centered_gamma": True}
    own_loss = FUSED | {"use_fused_lightning_indexer_kl_loss": False}
    ours, theirs = (
        pool.run(run, 1, switches=each, overrides=overrides)[0]["gradients"] for each in (own_loss, None)
    )
    assert_same_gradients(ours, theirs)


def test_short_sequences_on_tensor_parallel_ranks(pool):
    """By-head attention is chosen by the full sequence length, not by a tensor parallel rank's part of it."""
    run, long = f"{CASES}:whole_step", {"dsa_indexer_topk": 10}
    for overrides in (SHORT, long):
        alone = put_together(pool.run(run, 1, overrides=overrides))
        ours = pool.run(run, 2, switches=FUSED, overrides=overrides, tp=2)
        assert_same_gradients(put_together(ours), alone)


@pytest.mark.full
def test_tensor_parallelism_without_sequence_parallelism(pool):
    run, dense = f"{CASES}:whole_step", {"num_moe_experts": None, "moe_layer_freq": 1}
    dense |= {"moe_ffn_hidden_size": None, "moe_shared_expert_intermediate_size": None}
    alone = put_together(pool.run(run, 1, overrides=dense))
    ours = pool.run(run, 2, switches=FUSED, overrides=dense, tp=2, sequence_parallel=False)
    assert_same_gradients(put_together(ours), alone)


@pytest.mark.parametrize(
    "switches", [pytest.param(FUSED, marks=pytest.mark.full), IN_BACKWARD], ids=["forward", "backward"]
)
def test_a_frozen_indexer_is_logged_all_the_same(pool, switches):
    ours, theirs = (pool.run(f"{CASES}:frozen_indexer", 1, switches=each)[0] for each in (switches, None))
    torch.testing.assert_close(ours["tracked"], theirs["tracked"], rtol=1e-4, atol=1e-6)
    assert_same_gradients(ours["gradients"], theirs["gradients"])


def test_grad_scale_reaches_the_loss_in_backward(pool):
    run = f"{CASES}:whole_step"
    ours, theirs = (
        pool.run(run, 1, switches=each, grad_scale=128.0, num_microbatches=2)[0]["gradients"]
        for each in (IN_BACKWARD, None)
    )
    assert_same_gradients(ours, theirs)


def test_waiting_for_gathered_parameters_is_not_left_out(pool):
    # Megatron's overlapped parameter gather waits in a forward pre-hook, but this layer is never called.
    assert pool.run(f"{CASES}:hooks_of_the_up_projection", 1) == [[1, 1]]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("with_an_adapter", "dsa-absorb: linear_kv_up_proj holds adapter.*add --no-use-dsa-absorb"),
        ("packed", "packed sequences: no cu_seqlens_q says where documents end"),
        ("with_quantised_weights", "dsa-absorb: linear_kv_up_proj keeps its weight as Quantised"),
        ("decoding", "fused-dsa: 1 queries came with 5 keys.*cannot decode with DSA"),
    ],
)
def test_what_cannot_be_right_is_refused(pool, case, message):
    (error,) = pool.run("tests.support.model:error_of", 1, case=f"{CASES}:{case}")
    assert re.search(message, error), error


DSA = {"experimental_attention_variant": "dsa"}


@pytest.mark.parametrize(
    ("switches", "args", "message"),
    [
        (FUSED, {"experimental_attention_variant": None}, "the model has none: add --experimental-attention"),
        ({"use_fused_dsa": True, "dsa_backend": "npu"}, DSA, "needs the package torch_npu"),
        ({"use_fused_dsa": True, "dsa_backend": "npu"}, DSA, "runs on platform npu, and this is cpu"),
        ({"use_fused_dsa": True, "dsa_backend": "triton"}, DSA, "or set TRITON_INTERPRET=1"),
        (
            {"use_fused_lightning_indexer": True, "dsa_fuse_kl_in_backward": True},
            DSA,
            "and --use-dsa-absorb, --use-fused-sparse-flash-attention, .* are off; add --use-fused-dsa$",
        ),
        (
            IN_BACKWARD | {"use_dsa_absorb": False},
            DSA,
            "and --use-dsa-absorb is off; omit --no-use-dsa-absorb$",
        ),
        ({"dsa_fuse_kl_in_backward": True}, DSA, "needs all four fused parts"),
        (IN_BACKWARD, DSA | {"dsa_indexer_use_sparse_loss": False}, "add --dsa-indexer-use-sparse-loss"),
        (IN_BACKWARD | {"dsa_stage": "warmup"}, DSA, "forms the loss in the backward of sparse attention"),
        (FUSED, DSA | {"delay_wgrad_compute": True}, "no delayed weight gradients"),
        (FUSED, DSA | {"fp8": "hybrid", "fp8_param_gather": True}, "stores in fp8; omit --fp8-param-gather"),
        (
            IN_FP8,
            DSA,
            "Megatron's own indexer selects the keys; add --use-fused-dsa or --use-fused-lightning-",
        ),
        (
            FUSED | IN_FP8 | {"use_fused_lightning_indexer": False},
            DSA,
            "--dsa-indexer-precision fp8 is for our",
        ),
        (
            FUSED | IN_FP8 | {"dsa_backend": "npu"},
            DSA,
            "does not run on NPUs: torch_npu's npu_quant_lightning",
        ),
    ],
    ids=str,
)
def test_combinations_are_refused_before_training(monkeypatch, switches, args, message):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    namespace = SimpleNamespace(**switches, **args)
    with mindspeed_dsa.enabled(**DSA, **switches), pytest.raises(SettingsError, match=message):
        mindspeed_dsa.validate(namespace)


def test_nothing_is_patched_without_a_switch():
    from mindspeed_dsa import session

    for switches in ({}, DSA, {"dsa_backend": "cpu"}, {"dsa_stage": "sparse"}):
        _, active = session.resolve(switches, ())
        assert not {"fused-dsa", "dsa-absorb", "dsa-stage"} & {feature.name for feature in active}
