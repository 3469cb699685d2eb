"""Indexer loss on CPU, streamed in blocks of queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass, takes_every_call
from mindspeed_dsa.ops.cpu.blocks import Block, Scratch, over_blocks
from mindspeed_dsa.ops.cpu.products import compute_dtype, linear, product
from mindspeed_dsa.ops.indexer_kl_loss.chunked import divergence_and_gradient as divergence_and_gradient
from mindspeed_dsa.ops.indexer_kl_loss.chunked import divergence_of_rows
from mindspeed_dsa.ops.indexer_kl_loss.protocol import DenseCall
from mindspeed_dsa.ops.precision import gradient_dtype
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall, softmax

# Attention scores per block in the dense form. It must not depend on the machine: with tensor parallelism the
# target is reduced block by block, so every rank must cut its rows at the same places.
_DENSE_BLOCK = 1024 * 1024

KIND: Literal["gradients"] = "gradients"
plan_dense = takes_every_call


def unsupported(shape: ShapeClass) -> str | None:
    """Return why this backend cannot take calls of this shape, or None."""
    return None if shape.device == "cpu" else "it runs on CPU tensors only"


def attention_sum(call: AttentionCall, lse: Tensor | None) -> Tensor:
    """Return the main attention over the selected keys, summed over heads: ``[batch, query_length, topk]``.

    ``lse`` is not read: blocks hold complete rows, and recomputing their softmax is more accurate than using
    ``lse``.
    """
    query, topk_indices = call.query, call.topk_indices
    heads, dtype = query.shape[2], compute_dtype(query.dtype)
    summed = torch.zeros(topk_indices.shape, dtype=dtype)  # [batch, query_length, topk]

    def work(blocks: Iterator[Block], scratch: Scratch) -> None:
        for block in blocks:
            place, (rows, width) = (block.batch, block.rows), block.indices.shape
            q = scratch("query", *query[place].shape).copy_(query[place])
            scores = scratch("scores", rows, heads, width)  # [n, heads, width]
            for keys, _, _, (q_, scores_) in block.tiles(q, scores):
                product(q_, keys.mT, scores_, call.softmax_scale)
            if block.invalid is not None:
                scores.masked_fill_(block.invalid[:, None], -torch.inf)
            scores = softmax(scores, call.sink, scratch("probabilities", rows, heads, width))
            probabilities = torch.sum(scores, dim=1, out=summed[place][:, :width])  # [n, width]
            if block.invalid is not None:
                probabilities.masked_fill_(block.invalid, 0)

    over_blocks(call.key_value, topk_indices, 2 * heads, work)
    return summed


def dense_loss_and_gradients(
    call: DenseCall, with_gradients: bool
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Compute ``chunked.dense_loss_and_gradients`` with the faster of MKL and oneDNN."""
    index_query, index_key, index_weights = call.index.query, call.index.key, call.index.weights
    query, key, softmax_scale, tp_group = call.query, call.key, call.softmax_scale, call.tp_group
    starts, ends, row_weights = call.ranges.starts, call.ranges.ends, call.row_weights
    batch, query_length, heads, _ = query.shape
    index_heads = index_query.shape[2]
    # The wider of both sides' dtypes: indexer and main attention may differ.
    dtype = torch.promote_types(compute_dtype(index_query.dtype), compute_dtype(query.dtype))
    loss = torch.zeros((), dtype=torch.float64)
    grad_query, grad_weights = (
        torch.empty_like(x, dtype=gradient_dtype(x.dtype)) for x in (index_query, index_weights)
    )
    grad_key = torch.zeros(index_key.shape, dtype=dtype)  # [batch, key_length, index_dim]
    rows = max(1, _DENSE_BLOCK // (max(heads, index_heads) * max(key.shape[1], 1)))
    for b in range(batch):
        main_key, keys = key[b].to(dtype), index_key[b].to(dtype).contiguous()
        for first in range(0, query_length, rows):
            place = (b, slice(first, min(first + rows, query_length)))
            high = max(int(ends[place].max()), 0)
            # Rows that see nothing must not extend the range of keys.
            low = int(starts[place].where(starts[place] < ends[place], high).min())
            low = min(low, max(high - 1, 0))
            high = max(high, low + 1)
            position = torch.arange(low, high, dtype=torch.int32)
            valid = (position >= starts[place][:, None]) & (position < ends[place][:, None])  # [rows, keys]

            q = query[place].to(dtype)
            summed = _attention_sum(q, main_key[low:high], softmax_scale, valid, call.sink)
            if tp_group is not None:
                dist.all_reduce(summed, group=tp_group)

            q, w = index_query[place].to(dtype), index_weights[place].to(dtype)
            flat = q.reshape(-1, q.shape[2])  # [rows * index_heads, index_dim]
            # [rows, index_heads, keys]
            products = linear(flat, keys[low:high], relu=call.index.use_relu).view(*q.shape[:2], -1)
            scores = torch.bmm(w[:, None], products)[:, 0]  # [rows, keys]
            per_row, grad = divergence_of_rows(scores, summed, valid)
            loss += (per_row * row_weights[place]).sum(dtype=torch.float64)
            if not with_gradients:
                continue
            grad *= row_weights[place][:, None]
            grad_weights[place] = torch.bmm(products, grad[..., None])[..., 0]  # [rows, index_heads]
            grad_product = torch.bmm(w[..., None], grad[:, None])  # [rows, index_heads, keys]
            if call.index.use_relu:
                # The derivative of relu at zero is zero.
                grad_product = torch.ops.aten.threshold_backward(grad_product, products, 0)
            slopes = grad_product.view(flat.shape[0], -1)  # [rows * index_heads, keys]
            pulled = torch.empty(flat.shape, dtype=dtype)
            product(slopes, keys[low:high], pulled)
            grad_query[place] = pulled.view(q.shape)  # [rows, index_heads, index_dim]
            product(slopes.t(), flat, grad_key[b, low:high], add=True)
    gradients = (
        (grad_query, grad_key.to(gradient_dtype(index_key.dtype)), grad_weights) if with_gradients else None
    )
    return loss.to(compute_dtype(index_query.dtype)), gradients


def _attention_sum(
    query: Tensor, key: Tensor, softmax_scale: float, valid: Tensor, sink: Tensor | None
) -> Tensor:
    """Return the softmax over the visible keys, summed over heads.

    Args:
        query: ``[rows, heads, dim]``.
        key: ``[keys, dim]`` or ``[keys, heads, dim]``.
        softmax_scale: factor of the scores.
        valid: ``[rows, keys]`` bool.
        sink: ``[heads]``, or None.

    Returns:
        ``[rows, keys]``, zero in rows without a visible key.
    """
    rows, heads, dim = query.shape
    if key.dim() == 2:
        # [rows * heads, keys] -> [rows, heads, keys]
        scores = linear(query.reshape(rows * heads, dim), key).view(rows, heads, -1).mul_(softmax_scale)
    else:
        by_head = torch.empty(heads, rows, len(key), dtype=compute_dtype(query.dtype))
        # [heads, rows, dim] @ [heads, dim, keys]
        product(query.transpose(0, 1), key.permute(1, 2, 0), by_head, softmax_scale)
        scores = by_head.transpose(0, 1)  # [rows, heads, keys]
    scores = softmax(scores.masked_fill_(~valid[:, None], torch.finfo(scores.dtype).min), sink)
    return scores.sum(dim=1).masked_fill_(~valid, 0)  # [rows, keys]
