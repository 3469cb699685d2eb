"""Sparse flash attention on CPU: gather the keys of a few rows into cache, then two (five) small products.

One block holds complete rows, so the softmax needs no second pass and the sum of the probabilities over
heads, the target of the indexer loss, comes for free. The gradient of the keys is added block by block
in row order, which makes it deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.cpu_blocks import (
    Block,
    Scratch,
    batched_matmul,
    compute_dtype,
    over_blocks,
    scatter_add_rows,
    sum_in_order,
)


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
    return None if shape.device == "cpu" else "it runs on CPU tensors only"


def forward(
    query: Tensor,
    key_value: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    value_dim: int,
    return_attention_sum: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The three parts of :class:`SparseAttentionOutput`."""
    batch, query_length, heads, dim = query.shape
    dtype = compute_dtype(query.dtype)
    out = torch.empty(batch, query_length, heads, value_dim, dtype=query.dtype)
    lse = torch.empty(batch, query_length, heads, dtype=dtype)
    attention_sum = torch.zeros(topk_indices.shape, dtype=dtype) if return_attention_sum else None

    def work(blocks: Iterator[Block], scratch: Scratch) -> None:
        for block in blocks:
            at, (rows, width) = (block.batch, block.rows), block.indices.shape
            q = query[at].to(dtype) * softmax_scale
            scores = scratch("scores", rows, heads, width)
            batched_matmul(q, block.keys.transpose(1, 2), out=scores)
            if block.invalid is not None:
                scores.masked_fill_(block.invalid[:, None], -torch.inf)
            highest = scores.amax(dim=-1)
            probabilities = torch.softmax(scores, dim=-1, out=scratch("probabilities", rows, heads, width))
            # The most probable key has exp(0) / sum: log(sum) needs no second exponential.
            lse[at] = highest - probabilities.amax(dim=-1).log_()
            if block.invalid is not None:
                empty = block.invalid.all(dim=-1)
                probabilities.masked_fill_(empty[:, None, None], 0)
                lse[at].masked_fill_(empty[:, None], -torch.inf)
            if attention_sum is not None:
                attention_sum[at][:, :width] = probabilities.sum(dim=1)
            # The value is a slice of the key; a product with the dense key is faster than one with the slice.
            full = batched_matmul(probabilities, block.keys, out=scratch("out", rows, heads, dim))
            out[at] = full[..., :value_dim]

    over_blocks(key_value, topk_indices, 2 * heads, work)
    return out, lse, attention_sum


def backward(
    grad_out: Tensor,
    query: Tensor,
    key_value: Tensor,
    topk_indices: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    return_attention_sum: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of query and key_value, from the ``out`` and ``lse`` that :func:`forward` returned.

    The third part is the sum of the probabilities over heads, as in :func:`forward`, or None.
    """
    heads, dim = query.shape[2:]
    value_dim = out.shape[3]
    dtype = compute_dtype(query.dtype)
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    attention_sum = torch.zeros(topk_indices.shape, dtype=dtype) if return_attention_sum else None

    def work(blocks: Iterator[Block], scratch: Scratch) -> Tensor:
        grad_key_value = torch.zeros(key_value.shape, dtype=dtype)
        for block in blocks:
            at, (rows, width) = (block.batch, block.rows), block.indices.shape
            # Query over gradient: one product gives the scores and the gradient of the probabilities, and
            # one gives both paths into the key.
            stacked = scratch("stacked", rows, 2 * heads, dim)
            torch.mul(query[at].to(dtype), softmax_scale, out=stacked[:, :heads])
            stacked[:, heads:, :value_dim] = grad_out[at]
            stacked[:, heads:, value_dim:] = 0
            delta = (stacked[:, heads:, :value_dim] * out[at]).sum(dim=-1, keepdim=True)
            both = scratch("both", rows, 2 * heads, width)
            batched_matmul(stacked, block.keys.transpose(1, 2), out=both)
            scores, grad_probabilities = both[:, :heads], both[:, heads:]
            probabilities = scratch("probabilities", rows, heads, width)
            torch.sub(scores, lse[at][..., None], out=probabilities).exp_()
            if block.invalid is not None:
                probabilities.masked_fill_(block.invalid[:, None], 0)
            if attention_sum is not None:
                attention_sum[at][:, :width] = probabilities.sum(dim=1)
            # In place: the upper half becomes the gradient of the scores, the lower half the probabilities.
            torch.mul(grad_probabilities.sub_(delta), probabilities, out=scores)
            grad_probabilities.copy_(probabilities)
            grad_q = batched_matmul(scores, block.keys, out=scratch("grad_query", rows, heads, dim))
            grad_query[at] = grad_q.mul_(softmax_scale)
            scatter_add_rows(grad_key_value[block.batch], block, both.transpose(1, 2), stacked, scratch)
        return grad_key_value

    grad_key_value = sum_in_order(over_blocks(key_value, topk_indices, 4 * heads + dim, work))
    return grad_query, grad_key_value.to(key_value.dtype), attention_sum
