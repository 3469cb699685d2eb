"""A large offset shared by all logits does not change gradients, so no sum is stored added to its maximum.

All numbers are multiples of 1/8, so fp32 holds logits exactly. Any difference from fp64 was lost to the
offset.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mindspeed_dsa.ops.indexer_kl_loss import indexer_kl_loss
from mindspeed_dsa.ops.linear_cross_entropy import linear_cross_entropy
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.ops import oracle

OFFSETS = [100, 10000]
TOLERANCE = 4e-5
ROWS, KEYS, HEADS, TOPK, DIM = 16, 40, 4, 12, 9


def eighths(*shape):
    return (torch.randn(shape) * 8).round() / 8


def offset_by(offset, left, right):
    """Add an offset to all dot products of two operands, by an extra channel."""
    left[..., -1], right[..., -1] = 100, offset / 100


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("gradient", ["forward", "backward"])
@pytest.mark.parametrize("backend", ["cpu", "cuda", "npu"])
def test_linear_cross_entropy(backend, gradient, offset):
    hidden, weight, labels = eighths(ROWS, DIM), eighths(101, DIM), torch.randint(101, (ROWS,))
    offset_by(offset, hidden, weight)
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight)]
    loss = linear_cross_entropy(*leaves, labels, gradient=gradient, rows=7, backend=backend).loss
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = F.cross_entropy(wide[0] @ wide[1].t(), labels)
    for grad, right in zip(
        torch.autograd.grad(loss.mean(), leaves), torch.autograd.grad(expected, wide), strict=True
    ):
        assert oracle.relative_error(grad, right) < TOLERANCE


def attention_case(offset):
    query, key = eighths(1, ROWS, HEADS, DIM), eighths(1, KEYS, DIM)
    offset_by(offset, query, key)
    indices = torch.stack([torch.randperm(KEYS)[:TOPK] for _ in range(ROWS)])[None].int()
    indices[0, 3, 5:] = -1
    return query, key, indices


# Few of many keys: the CPU gathers them. Most of few keys: it masks the others.
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(("backend", "others"), [("cpu", 0), ("cpu", 1000), ("chunked", 0)])
def test_sparse_attention(backend, others, offset):
    query, key, indices = attention_case(offset)
    key = F.pad(key, (0, 0, 0, others))
    grad = torch.randn(1, ROWS, HEADS, DIM - 1)

    def gradients(dtype, name):
        leaves = [each.to(dtype).requires_grad_() for each in (query, key)]
        out = sparse_flash_attention(*leaves, indices, 1.0, value_dim=DIM - 1, backend=name).out
        return torch.autograd.grad(out, leaves, grad.to(dtype))

    expected = gradients(torch.float64, "reference")
    for found, right in zip(gradients(torch.float32, backend), expected, strict=True):
        assert oracle.relative_error(found, right) < TOLERANCE


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("backend", ["cpu", "chunked"])
def test_indexer_loss_that_is_given_the_sums_of_the_attention(backend, offset):
    query, key, indices = attention_case(offset)
    index = [torch.randn(1, ROWS, 2, 8), torch.randn(1, KEYS, 8), torch.rand(1, ROWS, 2)]

    def gradients(dtype, name):
        main = query.to(dtype), key.to(dtype)
        lse = sparse_flash_attention(*main, indices, 1.0, value_dim=DIM - 1, backend=name).lse
        leaves = [each.to(dtype).requires_grad_() for each in index]
        loss = indexer_kl_loss(*leaves, *main, indices, 1.0, lse=lse, backend=name)
        return torch.autograd.grad(loss, leaves)

    expected = gradients(torch.float64, "reference")
    for found, right in zip(gradients(torch.float32, backend), expected, strict=True):
        assert oracle.relative_error(found, right) < 5e-6
