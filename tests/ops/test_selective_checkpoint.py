"""Operators under selective checkpointing that saves matrix products, as TorchTitan's policy does."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mindspeed_dsa.ops.dsa import deepseek_sparse_attention

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default}


def policy(_context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("backend", ["chunked", "auto"])
def test_gradients_are_those_without(backend, stage):
    def inputs():
        generator = torch.Generator().manual_seed(0)
        shapes = ((1, 12, 2, 24), (1, 12, 24), (1, 12, 2, 16), (1, 12, 16), (1, 12, 2))
        return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]

    def attend(query, key, index_query, index_key, index_weights):
        options = {"topk": 4, "softmax_scale": 0.3, "value_dim": 16, "stage": stage, "with_loss": True}
        done = deepseek_sparse_attention(
            query, key, None, index_query, index_key, index_weights, backend=backend, **options
        )
        return done.out.square().sum() + done.loss

    expected, checkpointed = inputs(), inputs()
    attend(*expected).backward()
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    checkpoint(attend, *checkpointed, use_reentrant=False, context_fn=contexts).backward()
    for got, wanted in zip(checkpointed, expected, strict=True):
        assert (got.grad is None) == (wanted.grad is None)
        assert got.grad is None or torch.equal(got.grad, wanted.grad)
