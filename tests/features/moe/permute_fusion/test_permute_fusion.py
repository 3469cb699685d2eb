"""``--moe-permute-fusion`` without Transformer Engine computes the same as the stock layer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.features.moe.permute_fusion import feature, permutation
from mindspeed_dsa.features.moe.permute_fusion.feature import FEATURE
from mindspeed_dsa.features.moe.permute_fusion.permutation import counts
from tests.support import model, moe
from tests.support.contexts import context
from tests.support.model import losses_of

CASES = "tests.features.moe.permute_fusion.permuted_layer"
CAPACITY = {"moe_expert_capacity_factor": 0.75}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
EVERYWHERE = {
    "two of four experts": {},
    "no shared expert": {"moe_shared_expert_intermediate_size": None},
    "all tokens to two experts": {"favourites": (1, 0)},
    "padded to capacity": PADDED,
    "tokens dropped": CAPACITY,
    "bf16": {"dtype": "bfloat16"},
}
ALONE = {
    **EVERYWHERE,
    "all experts": {"moe_router_topk": 4},
    "shared expert behind a gate": {"moe_shared_expert_gate": True},
    "shared expert in the dispatcher": {"moe_shared_expert_overlap": True},
    "layer recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
}
IN_PAIRS = {
    **EVERYWHERE,
    "a rank without tokens": {"absent": (1,)},
    "one expert each": {"num_moe_experts": 2},
}
TOGETHER = {"two of four experts": {}, "padded to capacity": PADDED, "tokens dropped": CAPACITY}


def check(found, runs):
    """Check for equal numbers, bit for bit in fp32, and for calls of our operator by the dispatcher."""
    for rank in found:
        for name in runs:
            ours, theirs, calls = rank[name]["ours"], rank[name]["theirs"], rank[name]["calls"]
            moe.assert_same(ours, theirs, rtol=1e-2 if "bf16" in name else 0)
            passes = 2 * (2 if "recomputed" in name else 1)  # two microbatches
            sorts = 0 if name in ("padded to capacity", "one expert each", "allgather") else 2
            assert calls.get("permute") == calls.get("unpermute") == passes, name
            assert calls.get("sort_chunks", 0) == sorts * passes, name
            joins = "no shared" not in name and "dispatcher" not in name and name != "allgather"
            assert calls["added"] == (passes if joins else 0), name


@pytest.mark.full
def test_one_rank(pool):
    check(pool.run(f"{CASES}:beside_stock", 1, runs=ALONE), ALONE)


def test_two_ranks(pool):
    check(pool.run(f"{CASES}:beside_stock", 2, runs=IN_PAIRS, ep=2), IN_PAIRS)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, {"tp": 2, "ep": 2}), pytest.param(4, {"tp": 2, "ep": 2, "etp": 2}, marks=pytest.mark.full)],
    ids=["EP2 x TP2+SP", "EP2 x TP2+SP, ETP2"],
)
def test_with_tensor_parallelism(pool, ranks, layout):
    check(pool.run(f"{CASES}:beside_stock", ranks, runs=TOGETHER, **layout), TOGETHER)


def test_the_dispatcher_calls_ours_and_stock_is_restored(pool):
    (result,) = pool.run(f"{CASES}:consumers", 1)
    assert result["same"] == result["ours"] == [True] * 3
    assert result["names"] == [True] * 5
    assert result["kernels"] == [True] * 7
    assert result["after"] == [None] * 5
    assert "Error" in result["refused"]


@pytest.mark.parametrize("arguments", [{}, pytest.param({"pp": 3, "ep": 1}, marks=pytest.mark.full)])
def test_whole_model(pool, arguments):
    ranks = arguments.get("pp", 1)
    stock = pool.run(f"{CASES}:train_model", ranks, fused=False, **arguments)
    fused = pool.run(f"{CASES}:train_model", ranks, fused=True, **arguments)
    for before, after in zip(stock, fused, strict=True):
        assert losses_of(before) == losses_of(after)
        model.assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-6)
    assert sum(rank["calls"].get("unpermute", 0) for rank in fused) == 2 * 2
    assert not any(rank["calls"] for rank in stock)


def args(**values):
    return SimpleNamespace(
        **{"moe_permute_backend": "auto", "moe_token_dispatcher_type": "alltoall", **values}
    )


def test_the_flex_dispatcher_is_refused():
    assert FEATURE.problems(args()) == []
    (problem,) = FEATURE.problems(args(moe_token_dispatcher_type="flex"))
    assert "serves the dispatchers alltoall and allgather" in problem


@pytest.mark.parametrize(("backend", "left"), [("auto", True), ("triton", False)])
def test_transformer_engine_keeps_its_own_unless_asked(monkeypatch, backend, left):
    monkeypatch.setattr(feature, "find_spec", lambda name: object())
    kernels = SimpleNamespace(fused_unpermute=object())
    options = feature.Options.of(args(moe_permute_backend=backend))
    assert options.leaves_it_to_transformer_engine(lambda name: kernels) is left
    kernels.fused_unpermute = None  # Transformer Engine before 2.1
    assert not options.leaves_it_to_transformer_engine(lambda name: kernels)


def test_what_a_count_of_rows_says():
    """A number that Megatron knows before routing is tokens x top-k; a counted number is a tensor."""
    tokens = torch.empty(6, 1)
    assert counts(tokens, None) == {}
    assert counts(tokens, 12) == {"rows": 12, "topk": 2}
    assert counts(tokens, 13) == {"rows": 13, "topk": None}
    assert counts(tokens, torch.tensor(12)) == {"rows": 12, "topk": None}


def test_a_part_of_a_map_has_no_topk(monkeypatch):
    # Since 0.17 the allgather dispatcher passes a plain number, which may be a multiple of the tokens by
    # chance.
    def stock(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad=False, tokens_per_expert=None):
        raise AssertionError("not fused")

    said = []
    monkeypatch.setattr(permutation, "permute", lambda *_, **more: said.append(more["topk"]) or ())
    ours = permutation.permute_fused(stock, context("moe-permute-fusion", feature.Options("cpu")))
    tokens, part = torch.empty(2, 8), torch.tensor([[True, True], [False, False]])
    ours(tokens, part, num_out_tokens=2, fused=True)
    ours(tokens, part, part.float(), num_out_tokens=2, fused=True)
    assert said == [None, 1]
