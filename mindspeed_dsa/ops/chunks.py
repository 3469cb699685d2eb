"""What no operator of an accelerator computes, in plain PyTorch on any device, in chunks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.ops.indices import names_key

# Bytes that the intermediate tensors of a chunk may take.
_CHUNK_BYTES = 256 << 20


class Chunk(NamedTuple):
    """Rows of one sequence with the keys they selected."""

    batch: int
    rows: slice
    indices: Tensor
    """``[n, topk]`` int64; 0 where ``invalid``."""
    invalid: Tensor
    """``[n, topk]`` bool."""
    keys: Tensor
    """``[n, topk, dim]``, zero where ``invalid``."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Products and sums are in fp32, or in fp64 for fp64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def attention_sum(
    query: Tensor, key: Tensor, topk_indices: Tensor, lse: Tensor | None, softmax_scale: float
) -> Tensor:
    """Main attention over the selected keys, summed over heads: ``[batch, query_length, topk]`` fp32.

    Args:
        query: ``[batch, query_length, heads, dim]``.
        key: ``[batch, key_length, dim]``.
        topk_indices: ``[batch, query_length, topk]``; entries outside of the keys are none.
        lse: ``[batch, query_length, heads]`` of the same attention, or None to have it computed.
        softmax_scale: factor of the scores.
    """
    heads, dtype = query.shape[2], wide(query.dtype)
    summed = torch.zeros(topk_indices.shape, dtype=dtype, device=query.device)
    for chunk in row_chunks(key, topk_indices, 3 * heads):
        at = (chunk.batch, chunk.rows)
        # [n, heads, topk]
        scores = torch.bmm(query[at].to(dtype) * softmax_scale, chunk.keys.transpose(1, 2))
        if lse is None:
            hidden = chunk.invalid[:, None]
            scores = scores.masked_fill(hidden, torch.finfo(dtype).min).softmax(dim=-1)
        else:
            scores = (scores - lse[at][..., None]).exp_()
        summed[at] = scores.sum(dim=1).masked_fill_(chunk.invalid, 0)
    return summed


def scores_at(query: Tensor, key: Tensor, weights: Tensor, topk_indices: Tensor, use_relu: bool) -> Tensor:
    """Index scores at given entries, ``[batch, query_length, topk]`` fp32, -inf where there is no key."""
    heads, dtype = query.shape[2], wide(query.dtype)
    out = torch.empty(topk_indices.shape, dtype=dtype, device=query.device)
    for chunk in row_chunks(key, topk_indices, 2 * heads):
        at = (chunk.batch, chunk.rows)
        product = torch.bmm(query[at].to(dtype), chunk.keys.transpose(1, 2))
        if use_relu:
            product = product.relu_()
        scores = torch.bmm(weights[at].to(dtype)[:, None], product)[:, 0]
        out[at] = scores.masked_fill_(chunk.invalid, -torch.inf)
    return out


def score_gradients(
    grad_scores: Tensor, query: Tensor, key: Tensor, weights: Tensor, topk_indices: Tensor, use_relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the scores at ``topk_indices`` with respect to query, key and weights."""
    heads, dtype = query.shape[2], wide(query.dtype)
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    grad_key = torch.zeros(key.shape, dtype=dtype, device=key.device)
    for chunk in row_chunks(key, topk_indices, 4 * heads + key.shape[2]):
        at = (chunk.batch, chunk.rows)
        q, w = query[at].to(dtype), weights[at].to(dtype)
        grad = grad_scores[at].to(dtype).masked_fill(chunk.invalid, 0)
        # [n, heads, topk]
        product = torch.bmm(q, chunk.keys.transpose(1, 2))
        grad_product = w[..., None] * grad[:, None]
        if use_relu:
            # The derivative of relu at zero is zero.
            grad_product = grad_product.masked_fill_(product <= 0, 0)
            product = product.relu_()
        grad_weights[at] = torch.bmm(product, grad[..., None])[..., 0].to(weights.dtype)
        grad_query[at] = torch.bmm(grad_product, chunk.keys).to(query.dtype)
        rows = torch.bmm(grad_product.transpose(1, 2), q)
        grad_key[chunk.batch].index_add_(0, chunk.indices.flatten(), rows.flatten(0, 1))
    return grad_query, grad_key, grad_weights


def dense_lse(query: Tensor, key: Tensor, softmax_scale: float, starts: Tensor, ends: Tensor) -> Tensor:
    """Logarithm of the sum of exp(scores) over all visible keys: ``[batch, query_length, heads]`` fp32.

    Args:
        query: ``[batch, query_length, heads, dim]``.
        key: ``[batch, key_length, heads, dim]``.
        softmax_scale: factor of the scores.
        starts: ``[batch, query_length]``, first visible key.
        ends: ``[batch, query_length]``, one past the last visible key.
    """
    batch, length, heads, _ = query.shape
    dtype, keys = wide(query.dtype), key.shape[1]
    position = torch.arange(keys, device=query.device)
    lse = torch.empty(batch, length, heads, dtype=dtype, device=query.device)
    rows = max(1, _CHUNK_BYTES // max(1, 3 * heads * keys * dtype.itemsize))
    for b in range(batch):
        # [heads, dim, keys]
        transposed = key[b].permute(1, 2, 0).to(dtype)
        for first in range(0, length, rows):
            at = (b, slice(first, first + rows))
            scores = torch.bmm((query[at].to(dtype) * softmax_scale).transpose(0, 1), transposed)
            hidden = (position < starts[at][:, None]) | (position >= ends[at][:, None])
            lse[at] = scores.masked_fill_(hidden, -torch.inf).logsumexp(dim=-1).t()
    return lse


def row_chunks(key: Tensor, topk_indices: Tensor, scratch_per_entry: int) -> Iterator[Chunk]:
    """Cut the rows into chunks and gather their keys; the caller holds ``scratch_per_entry`` numbers each."""
    batch, length, topk = topk_indices.shape
    dim, dtype = key.shape[2], wide(key.dtype)
    rows = max(1, _CHUNK_BYTES // max(1, topk * (2 * dim + scratch_per_entry) * dtype.itemsize))
    for b in range(batch):
        for first in range(0, length, rows):
            part = slice(first, first + rows)
            indices = topk_indices[b, part].long()
            invalid = ~names_key(indices, key.shape[1])
            indices = indices.masked_fill(invalid, 0)
            keys = key[b].index_select(0, indices.flatten()).view(*indices.shape, dim).to(dtype)
            yield Chunk(b, part, indices, invalid, keys.masked_fill_(invalid[..., None], 0))
