"""Dense models take the same step on context parallel ranks as on one rank."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.features.attention.context_parallel import dense_model
from tests.support import model as job

CASES = "tests.features.attention.context_parallel.dense_model"
RING, HEADS, HYBRID = "megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo"
OVERLAPPED = {"ddp": {"overlap_grad_reduce": True, "bucket_size": 2000}}

QUICK = (
    ("grouped", 2, {"algorithm": RING, **OVERLAPPED}),
    ("latent", 4, {"algorithm": HYBRID, "degree": 2}),
    ("latent", 2, {"algorithm": RING, "overrides": {"apply_rope_fusion": True}}),
)
FULL = (
    ("grouped", 2, {"algorithm": HEADS}),
    ("grouped", 3, {"algorithm": RING}),
    ("grouped", 4, {"algorithm": HEADS}),  # fewer key heads than ranks
    ("grouped", 4, {"algorithm": HYBRID, "degree": 2, **OVERLAPPED}),
    ("grouped", 2, {"tp": 2}),
    ("grouped", 2, {"tp": 2, "algorithm": HEADS}),
    ("grouped", 2, {"tp": 2, "algorithm": RING, "sequence_parallel": False}),
    ("grouped", 2, {"pp": 2, "algorithm": RING}),
    ("grouped", 2, {"algorithm": RING, "recompute": True}),
    ("latent", 1, {}),
    ("latent", 2, {"algorithm": RING, **OVERLAPPED}),
    ("latent", 3, {"algorithm": RING}),
    ("latent", 4, {"algorithm": RING}),
    ("latent", 2, {"algorithm": HEADS}),
    ("latent", 2, {"tp": 2, "algorithm": RING}),
    ("latent", 2, {"tp": 2, "algorithm": HEADS}),
    ("latent", 2, {"tp": 2, "algorithm": RING, "sequence_parallel": False}),
    ("latent", 2, {"pp": 2, "algorithm": RING}),
    ("latent", 2, {"algorithm": RING, "recompute": True}),
)
LAYERS, MICROBATCHES = 2, 2


@pytest.fixture(scope="module")
def one_rank(pool):
    """Return a cached function that takes one step on one rank."""
    # The step with grouped heads runs without any of our code, so it is Megatron's own.

    @cache
    def step(attention: str) -> dict[str, Any]:
        (result,) = pool.run(f"{CASES}:step", 1, attention=attention)
        assert (result["calls"] == 0) == (attention == "grouped")
        return result

    return step


@pytest.mark.full
@pytest.mark.parametrize("algorithm", [RING, HEADS])
def test_one_key_value_head_for_two_tensor_parallel_ranks(pool, algorithm):
    one = {"overrides": {"num_query_groups": 1}, "attention": "grouped"}
    (expected,) = pool.run(f"{CASES}:step", 1, **one)
    ranks = pool.run(f"{CASES}:step", 4, cp=2, tp=2, algorithm=algorithm, **one)
    actual = dense_model.in_one_group(ranks, 2, 2)
    torch.testing.assert_close(actual["losses"], expected["losses"], rtol=1e-5, atol=0)
    job.assert_same_gradients(actual["gradients"], expected["gradients"], rtol=1e-5)


def check(pool, one_rank, attention, cp, given):
    arguments = dict(given)
    recompute = arguments.pop("recompute", False)
    if recompute:
        arguments["overrides"] = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        if attention == "latent":
            arguments["overrides"]["recompute_modules"].append("mla_up_proj")
    tp, pp = arguments.get("tp", 1), arguments.get("pp", 1)
    ranks = pool.run(f"{CASES}:step", cp * tp * pp, attention=attention, cp=cp, **arguments)
    assert all(rank["calls"] > 0 for rank in ranks), "the operator ran on every rank"
    actual, expected = dense_model.in_one_group(ranks, cp, tp), one_rank(attention)
    if attention == "latent" and not arguments.get("sequence_parallel", True):
        # Megatron sums this norm's gradient over tensor parallel ranks, but each rank already has all of it.
        for name in actual["gradients"]:
            if "q_layernorm" in name:
                actual["gradients"][name] /= tp
    torch.testing.assert_close(actual["losses"], expected["losses"], rtol=1e-5, atol=0)
    job.assert_same_gradients(actual["gradients"], expected["gradients"], rtol=1e-5)


@pytest.mark.parametrize(("attention", "cp", "given"), QUICK, ids=str)
def test_same_step_as_on_one_rank(pool, one_rank, attention, cp, given):
    check(pool, one_rank, attention, cp, given)


@pytest.mark.full
@pytest.mark.parametrize(("attention", "cp", "given"), FULL, ids=str)
def test_same_step_as_on_one_rank_in_other_layouts(pool, one_rank, attention, cp, given):
    check(pool, one_rank, attention, cp, given)


@pytest.mark.parametrize(
    ("recompute", "layout"),
    [
        pytest.param((), {}, marks=pytest.mark.full),
        (("mla_up_proj",), {}),
        pytest.param(("core_attn", "mla_up_proj"), {}, marks=pytest.mark.full),
        pytest.param((), {"tp": 2}, marks=pytest.mark.full),
    ],
    ids=["alone", "recomputed projections", "recomputed", "TP2 and SP"],
)
def test_queries_in_two_parts_take_the_same_step(pool, one_rank, recompute, layout):
    overrides = (
        {"recompute_granularity": "selective", "recompute_modules": list(recompute)} if recompute else {}
    )
    ranks = pool.run(f"{CASES}:step_in_parts", layout.get("tp", 1), overrides=overrides, **layout)
    expected = one_rank("latent")
    for rank in ranks:
        passes = 2 if "core_attn" in recompute else 1
        assert rank["attended"] == [job.LATENT["qk_head_dim"]] * LAYERS * MICROBATCHES * passes
        torch.testing.assert_close(rank["losses"], expected["losses"], rtol=1e-5, atol=0)
    job.assert_same_gradients(job.put_together(ranks), expected["gradients"], rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("given_to_megatron", [False, True])
def test_groups_of_the_hybrid(pool, given_to_megatron):
    found = pool.run(f"{CASES}:hybrid_groups", 4, given_to_megatron=given_to_megatron)
    assert found == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
