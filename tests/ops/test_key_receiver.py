"""A receiver of the key gradient gets the operator's wide sum, not rounded to bf16."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.lightning_indexer import cpu_dense as dense_indexer
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer, selected_scores
from mindspeed_dsa.ops.sparse_flash_attention import cpu_dense as dense_attention
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.ops.random_inputs import indexer_inputs, random_indices
from tests.ops.test_sparse_flash_attention import attention_inputs


def index_gradient(backend, with_receiver):
    query, key, weights = (
        x.detach().to(torch.bfloat16).requires_grad_() for x in indexer_inputs(1, 37, 37, 4, 16)
    )
    receiver = torch.empty(key.shape, requires_grad=True) if with_receiver else None
    _, scores = lightning_indexer(query, key, weights, 20, key_receiver=receiver, backend=backend)
    scores.masked_fill(scores.isinf(), 0).sum().backward()
    return key.grad, None if receiver is None else receiver.grad


def gradient_at_entries(backend, with_receiver):
    query, key, weights = (
        x.detach().to(torch.bfloat16).requires_grad_() for x in indexer_inputs(1, 37, 37, 4, 16)
    )
    receiver = torch.empty(key.shape, requires_grad=True) if with_receiver else None
    indices = random_indices(1, 37, 37, 20)
    scores = selected_scores(query, key, weights, indices, key_receiver=receiver, backend=backend)
    scores.masked_fill(scores.isinf(), 0).sum().backward()
    return key.grad, None if receiver is None else receiver.grad


def attention_gradient(backend, with_receiver):
    query, key_value = attention_inputs(1, 19, 40, 3, 24, torch.bfloat16)
    receiver = torch.empty(key_value.shape, requires_grad=True) if with_receiver else None
    indices = random_indices(1, 19, 40, 20)
    result = sparse_flash_attention(
        query, key_value, indices, 0.3, value_dim=16, key_receiver=receiver, backend=backend
    )
    result.out.float().square().sum().backward()
    return key_value.grad, None if receiver is None else receiver.grad


@pytest.mark.parametrize("gradient", [index_gradient, gradient_at_entries, attention_gradient])
@pytest.mark.parametrize("form", ["chunked", "gathered", "dense"])
def test_it_is_not_rounded(gradient, form, monkeypatch):
    for module in (dense_indexer, dense_attention):
        monkeypatch.setattr(module, "declines", lambda *_: None if form == "dense" else "it rains")
    backend = "chunked" if form == "chunked" else "cpu"
    of_key, nothing = gradient(backend, with_receiver=False)
    none_of_key, received = gradient(backend, with_receiver=True)
    assert nothing is none_of_key is None
    assert of_key.dtype == torch.bfloat16
    assert torch.equal(received.to(torch.bfloat16), of_key)
    assert not torch.equal(received, of_key.float())
