"""Unsupported settings are refused with one sentence, before training or at the first batch."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.context_parallel.gather import KeyGather
from mindspeed_dsa.features.attention.context_parallel.core_attention import (
    Plan,
    attend_with_other_ranks,
)
from mindspeed_dsa.features.attention.context_parallel.dense import DenseAttention, Payload
from mindspeed_dsa.features.attention.context_parallel.feature import (
    Options,
    check_dense_attention,
    wanted,
    without_mask,
)
from mindspeed_dsa.features.attention.context_parallel.head_exchange import check_heads
from mindspeed_dsa.features.attention.context_parallel.ring import Ring, ring_attention
from tests.support.contexts import context

GOOD = {
    "context_parallel_size": 8,
    "context_parallel_algo": "ulysses_cp_algo",
    "tensor_model_parallel_size": 2,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "attention_dropout": 0.0,
    "reset_attention_mask": False,
    "window_size": None,
    "softmax_type": "vanilla",
}


def problems(**changed):
    args = SimpleNamespace(**{**GOOD, **changed})
    return list(check_dense_attention(args, Options.of(args)))


def test_what_works_is_not_refused():
    assert problems() == []
    assert problems(context_parallel_algo="megatron_cp_algo", num_attention_heads=6, num_query_groups=2) == []
    # Megatron repeats each of 4 key-value heads for 2 tensor parallel ranks.
    repeated = {"tensor_model_parallel_size": 8, "num_attention_heads": 64, "num_query_groups": 4}
    assert problems(context_parallel_algo="megatron_cp_algo", **repeated) == []
    hybrid = {"context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 4}
    assert problems(**hybrid) == []
    assert problems(experimental_attention_variant="dsa", context_parallel_algo="kvallgather_cp_algo") == []
    assert problems(context_parallel_size=1, attention_dropout=0.1) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_attention_heads": 24}, "24 heads .* use hybrid_cp_algo with --ulysses-degree-in-cp 4"),
        ({"num_attention_heads": 30, "num_query_groups": 30}, "use megatron_cp_algo"),
        ({"num_query_groups": 6, "num_attention_heads": 48}, "6 key-value heads .* use megatron_cp_algo"),
        ({"context_parallel_algo": "kvallgather_cp_algo"}, "gathers the keys of sparse attention"),
        ({"attention_dropout": 0.1}, "--attention-dropout"),
        ({"reset_attention_mask": True}, "--reset-attention-mask"),
        ({"window_size": (128, 0)}, "--window-size"),
        ({"softmax_type": "learnable"}, "--softmax-type"),
        ({"sft": True}, "cut documents with Transformer Engine"),
    ],
)
def test_refused_before_training(changed, message):
    (problem,) = problems(**changed)
    assert re.search(message, problem), problem


def test_the_mask_of_the_whole_batch_is_left_out():
    args = SimpleNamespace(create_attention_mask_in_dataloader=True, reset_attention_mask=False)
    assert len(without_mask(args)) == 1
    assert args.create_attention_mask_in_dataloader is False
    assert without_mask(args) == ()
    kept = SimpleNamespace(create_attention_mask_in_dataloader=True, reset_attention_mask=True)
    assert without_mask(kept) == ()


def test_what_comes_with_a_batch():
    states = torch.randn(4, 1, 2, 8)
    forward = attend_with_other_ranks(lambda *given: "Megatron's own", context("dense-context-parallel"))
    attention = SimpleNamespace(dense_context_parallel_plan=Plan(DenseAttention(0.3), None))
    assert forward(attention, states, states, states, None).shape == (4, 1, 16)
    assert forward(SimpleNamespace(), states, states, states, states) == "Megatron's own"
    packed = {"attention_mask": None, "packed_seq_params": object()}
    assert forward(attention, states, states, states, **packed) == "Megatron's own"
    attention.dense_context_parallel_plan = Plan(DenseAttention(0.3), Ring(SimpleNamespace(size=lambda: 2)))
    for arguments, message in (
        ({"attention_mask": states}, "an attention mask came with a batch"),
        ({"attention_mask": None, "attention_bias": states}, "an attention bias"),
    ):
        with pytest.raises(ValueError, match=f"dense-context-parallel: {message}"):
            forward(attention, states, states, states, **arguments)
    with pytest.raises(ValueError, match="1 queries came with 4 keys, as in generation"):
        forward(attention, states[-1:], states, states, None)


def test_packs_that_a_strategy_or_a_rotary_embedding_does_not_know():
    states, group = torch.randn(4, 1, 2, 8), SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    whole_only = Plan(DenseAttention(0.3), KeyGather(group))
    payload = Payload.of(states, states)
    with pytest.raises(ValueError, match="dense-context-parallel: KeyGather takes whole sequences"):
        whole_only.attend_to_documents(states, payload, object())
    sums = torch.tensor([0, 3, 8])
    dealt = SimpleNamespace(qkv_format="thd", cu_seqlens_q=sums, dealt_block_rows=2)
    with pytest.raises(ValueError, match="rotates the rows of grouped heads"):
        Plan(DenseAttention(0.3), Ring(group)).attend_to_documents(states, payload, dealt)


def test_rows_and_heads_that_cannot_be_shared():
    odd = torch.randn(5, 1, 2, 8)
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with pytest.raises(ValueError, match="5 rows are not two; use a sequence length divisible by 4"):
        ring_attention(DenseAttention(0.3), odd, Payload.of(odd, odd), group)
    with pytest.raises(ValueError, match=r"2 heads with 2 key-value heads .* cannot be shared by 3 ranks"):
        check_heads(2, Payload.of(odd, odd), 3)
    check_heads(4, Payload.of(odd, odd), 4)  # two key-value heads, each on two ranks


def test_when_it_is_on():
    local = {"multi_latent_attention": True, "transformer_impl": "local"}
    assert wanted(SimpleNamespace(context_parallel_size=2))
    assert wanted(SimpleNamespace(**local))
    assert not wanted(SimpleNamespace(**local, experimental_attention_variant="dsa"))
    assert not wanted(SimpleNamespace(multi_latent_attention=True, transformer_impl="transformer_engine"))
    assert not wanted(SimpleNamespace(context_parallel_size=1))
