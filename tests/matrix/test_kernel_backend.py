"""Our kernel backend in real training under Megatron-core 0.19."""

from __future__ import annotations

import pytest
import torch

from tests.support.model import assert_same_gradients, put_together

pytestmark = pytest.mark.releases(">=0.19")

CASE = "tests.matrix.kernel_steps"
LATENT = 16
"""Width of the model's absorbed queries without their 8 rotary dimensions."""
ON = {"use_fused_dsa": True}
ALONE = {
    "use_fused_lightning_indexer": {"run_fused_qk_topk"},
    "use_fused_sparse_flash_attention": {"run_fused_absorbed_sparse_attention"},
}


def step(pool, switches, overrides=None):
    (result,) = pool.run(f"{CASE}:step", 1, switches=switches, overrides=overrides)
    return result


def same(result, expected):
    torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-5, atol=0)
    trained = [name for name, gradient in expected["gradients"].items() if gradient.any()]
    assert len(trained) > 30
    assert_same_gradients(
        *({name: step["gradients"][name] for name in trained} for step in (result, expected))
    )


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"dsa_indexer_use_sparse_loss": False},
        {"dsa_indexer_topk": 64},
        {"dsa_indexer_scoring_relu": False},
        {"calculate_per_token_loss": True},
        {"dsa_indexer_loss_coeff": 0.0},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ],
    ids=["sparse loss", "dense loss", "dense", "no relu", "per token", "no loss", "recompute"],
)
def test_megatrons_own_values(pool, overrides):
    expected, result = step(pool, {}, overrides), step(pool, ON, overrides)
    assert not any(expected["taken"].values())
    assert result["taken"]["run_fused_dsa_attention"] >= 4  # two layers, two microbatches
    assert sum(result["taken"].values()) == result["taken"]["run_fused_dsa_attention"]
    same(result, expected)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"dsa_indexer_use_sparse_loss": False, "dsa_indexer_topk": 64},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
        {"dsa_indexer_topk_freq": 2, "dsa_indexer_loss_coeff": 0.0},
    ],
    ids=["sparse loss", "dense", "recompute", "recomputed projections", "shared choice"],
)
def test_a_query_in_two_parts_goes_past_the_hooks(pool, overrides):
    (result,) = pool.run(f"{CASE}:step_in_parts", 1, switches=ON, overrides=overrides)
    assert len(result["widths"]) >= 4
    assert set(result["widths"]) == {LATENT}
    assert not any(result["taken"].values())
    same(result, step(pool, {}, overrides))


@pytest.mark.parametrize("switch", ALONE)
def test_each_part_alone(pool, switch):
    overrides = {"dsa_indexer_loss_coeff": 0.0}
    result = step(pool, {switch: True}, overrides)
    assert {name for name, count in result["taken"].items() if count} == ALONE[switch]
    same(result, step(pool, {}, overrides))


def test_without_the_attention_the_loss_comes_from_its_own_hook(pool):
    result = step(pool, {**ON, "use_fused_sparse_flash_attention": False})
    assert {n for n, count in result["taken"].items() if count} == {"run_fused_qk_topk_with_loss"}
    same(result, step(pool, {}))


@pytest.mark.parametrize("switch", [None, *sorted(ALONE)])
def test_layers_that_share_a_choice(pool, switch):
    """If all parts are ours, attention runs without calling hooks; otherwise Megatron calls them."""
    overrides = {"dsa_indexer_topk_freq": 2, "dsa_indexer_loss_coeff": 0.0}
    result = step(pool, ON if switch is None else {switch: True}, overrides)
    assert {name for name, count in result["taken"].items() if count} == ALONE.get(switch, set())
    same(result, step(pool, {}, overrides))


def test_tensor_and_sequence_parallel(pool):
    ranks = pool.run(f"{CASE}:step", 2, switches=ON, tp=2)
    same({**ranks[0], "gradients": put_together(ranks)}, step(pool, ON))


def test_context_parallel(pool):
    expected = pool.run(f"{CASE}:context_parallel_step", 2)
    result = pool.run(f"{CASE}:context_parallel_step", 2, switches=ON)
    for mine, megatrons in zip(result, expected, strict=True):
        assert mine["loss"] == pytest.approx(megatrons["loss"], rel=1e-5)
        assert_same_gradients(mine["gradients"], megatrons["gradients"])


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize(
    ("switches", "overrides"),
    [
        (ON, {}),
        (ON, {"dsa_indexer_use_sparse_loss": False}),
        ({**ON, "use_fused_sparse_flash_attention": False}, {}),
        (ON, {"calculate_per_token_loss": True}),
    ],
    ids=["sparse loss", "dense loss", "loss alone", "per token"],
)
def test_context_parallel_ranks_have_the_gradients_and_the_loss_of_one(pool, cp, switches, overrides):
    arguments = {"switches": switches, "overrides": overrides}
    if overrides.get("calculate_per_token_loss"):
        arguments["ddp"] = {"average_in_collective": False}
    case = f"{CASE}:context_parallel_training"
    (expected,) = pool.run(case, 1, cp=1, **arguments)
    for rank in pool.run(case, cp, cp=cp, **arguments):
        # If all parts are ours, attention runs on gathered keys without calling hooks.
        assert any(rank["taken"].values()) == ("use_fused_sparse_flash_attention" in switches)
        assert_same_gradients(rank["gradients"], expected["gradients"])
        assert rank["indexer loss"] == pytest.approx(expected["indexer loss"], rel=1e-5)


CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
UP = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}


@pytest.mark.parametrize(
    ("overrides", "layout"),
    [
        ({}, {"tp": 2}),
        (CORE, {}),
        pytest.param(UP, {}, marks=pytest.mark.full),
        pytest.param({"dsa_indexer_scoring_relu": False, "dsa_indexer_topk": 64}, {}, marks=pytest.mark.full),
    ],
    ids=["TP2 and SP", "recompute", "recomputed projections", "no relu, every key"],
)
def test_keys_gathered_behind_the_projections(pool, overrides, layout):
    case, ranks = f"{CASE}:context_parallel_training", 2 * layout.get("tp", 1)
    (expected,) = pool.run(case, 1, cp=1, switches=ON, overrides=overrides)
    results = pool.run(case, ranks, cp=2, switches=ON, overrides=overrides, **layout)
    begins = ["start 24", "start 16"] if overrides is not CORE else ["start 24", "take 24", "start 16"]
    for rank in results:
        assert rank["gathers"][: len(begins)] == begins
        assert rank["indexer loss"] == pytest.approx(expected["indexer loss"], rel=1e-5)
    first = [rank for rank in results if rank["context"] == 0]
    assert_same_gradients(put_together(first), expected["gradients"])


@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=["alone", "TP2 and SP"])
def test_keys_gathered_in_two_parts(pool, layout):
    case, ranks = f"{CASE}:context_parallel_training", 2 * layout.get("tp", 1)
    (expected,) = pool.run(case, 1, cp=1, switches=ON)
    results = pool.run(f"{case}_in_parts", ranks, cp=2, switches=ON, **layout)
    for rank in results:
        assert rank["gathers"][:3] == [f"start {LATENT}", "start 8", "start 16"]
        assert rank["indexer loss"] == pytest.approx(expected["indexer loss"], rel=1e-5)
    first = [rank for rank in results if rank["context"] == 0]
    assert_same_gradients(put_together(first), expected["gradients"])


@pytest.mark.parametrize("overrides", [{}, {"calculate_per_token_loss": True}], ids=["mean", "per token"])
def test_megatrons_own_indexer_has_the_gradients_of_one_rank(pool, overrides):
    """Without the repair, gradients of two ranks are twice as large, except with per-token loss."""
    arguments = {"overrides": overrides, "ddp": {"average_in_collective": False}}
    case = f"{CASE}:context_parallel_training"
    (expected,) = pool.run(case, 1, cp=1, switches={}, **arguments)
    for rank in pool.run(case, 2, cp=2, switches={}, **arguments):
        assert not any(rank["taken"].values())
        assert_same_gradients(rank["gradients"], expected["gradients"])
    off = pool.run(case, 2, cp=2, switches={"no_dsa_repairs": "cp-loss-grads"}, **arguments)[0]["gradients"]
    factor = 1 if overrides else 2
    for name, gradient in expected["gradients"].items():
        if ".indexer." in name:
            torch.testing.assert_close(off[name], factor * gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("counted", [8, 5], ids=["some padding", "one rank of padding"])
def test_padding_rows_do_not_count_on_any_context_parallel_rank(pool, counted):
    ranks = pool.run(f"{CASE}:valid_rows_on_two_ranks", 2, counted=counted)
    assert sum(rank["loss"] for rank in ranks) / 2 == pytest.approx(ranks[0]["whole"], rel=1e-5)
    assert any(rank["gradients"][1].any() for rank in ranks)
    for rank in ranks:
        torch.testing.assert_close(*rank["gradients"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sparse_loss", [True, False])
def test_packed_sequences_do_not_see_each_other(pool, sparse_loss):
    (result,) = pool.run(f"{CASE}:packed", 1, sparse_loss=sparse_loss)
    torch.testing.assert_close(*result["output"], rtol=1e-5, atol=1e-5)
    assert result["loss"][0] == pytest.approx(result["loss"][1], rel=1e-5)
    for name, (packed, alone) in result["gradients"].items():
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5, msg=name)


def test_a_model_trains_on_a_pack_as_on_its_documents_one_by_one(pool):
    """This release describes the rows itself, and the script passes no lengths."""
    packs = "tests.features.attention.packs.documents"
    (packed,), (alone,) = (
        pool.run(f"{packs}:one_pass", 1, packed=each, padding=0, overrides={"dsa_indexer_n_heads": 16})
        for each in (True, False)
    )
    torch.testing.assert_close(packed["losses"], alone["losses"], rtol=1e-5, atol=1e-5)
    assert packed["indexer loss"] == pytest.approx(alone["indexer loss"], rel=1e-5)
    assert_same_gradients(packed["gradients"], alone["gradients"], 1e-5)
    (alone,) = pool.run(f"{packs}:scripted_step", 1, alone=True, from_tokens=True)
    ranks = pool.run(f"{packs}:scripted_step", 4, tp=2, pp=2, from_tokens=True)
    assert_same_gradients(put_together(ranks), alone["gradients"], 2e-5)
    ranks = pool.run(f"{packs}:scripted_step", 2, cp=2, from_tokens=True)  # our gathers, dealt rows
    assert_same_gradients(put_together(ranks[:1]), alone["gradients"], 2e-5)
    shared = {"overrides": {"dsa_indexer_topk_freq": 2}, "from_tokens": True}
    (alone,) = pool.run(f"{packs}:scripted_step", 1, alone=True, **shared)
    ranks = pool.run(f"{packs}:scripted_step", 2, cp=2, **shared)
    assert_same_gradients(put_together(ranks[:1]), alone["gradients"], 2e-5)


def test_documents_that_the_script_has_cut(pool):
    """Megatron gathers hidden states for the indexer there, so each rank has its whole gradient."""
    case = "tests.features.attention.packs.documents:scripted_step"
    expected = pool.run(case, 2, cp=2, cut=True)
    ranks = pool.run(case, 4, cp=2, tp=2, cut=True)
    for context in (0, 1):
        together = put_together([rank for rank in ranks if rank["context"] == context])
        assert_same_gradients(together, expected[context]["gradients"], 2e-5)


def test_padding_rows_do_not_count(pool):
    ((padded, alone),) = pool.run(f"{CASE}:valid_rows", 1)
    assert padded == pytest.approx(alone, rel=1e-5)


def test_entries_past_the_length_do_not_count(pool):
    ((cut, marked, beyond),) = pool.run(f"{CASE}:topk_length_cuts", 1)
    torch.testing.assert_close(cut, marked, rtol=0, atol=0)
    torch.testing.assert_close(cut, beyond, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("switches", "chosen"),
    [(ON, "mindspeed"), ({"dsa_backend": "reference"}, "mindspeed"), ({}, "none")],
    ids=["fused", "backend", "nothing"],
)
def test_the_switches_choose_the_backend(pool, switches, chosen):
    assert pool.run(f"{CASE}:chosen_backend", 1, switches=switches) == [chosen]


def test_the_flag_knows_the_backend(pool):
    assert pool.run(f"{CASE}:flag_choices", 1) == [["none", "tilelang", "cudnn", "mindspeed"]]


@pytest.mark.parametrize(
    ("switches", "overrides", "message"),
    [
        (ON, {"dsa_kernel_backend": "tilelang"}, "other kernels than --use-fused-dsa"),
        (ON, {"attention_backend": "unfused"}, "queries no kernel backend"),
        ({**ON, "dsa_fuse_kl_in_backward": True}, {}, "omit it"),
        ({}, {"dsa_kernel_backend": "mindspeed"}, "must be one of"),
        # Megatron's own refusal.
        ({}, {"dsa_kernel_backend": "tilelang"}, "dsa_kernel_backend=tilelang requires a CUDA device"),
    ],
)
def test_what_cannot_be_is_refused(pool, switches, overrides, message):
    (error,) = pool.run(
        "tests.support.model:error_of",
        1,
        case=f"{CASE}:chosen_backend",
        switches=switches,
        overrides=overrides,
    )
    assert message in error
