"""Gradients of the index scores on CPU for few keys, in dense chunks of rows: see ``ops/cpu/chunks.py``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mindspeed_dsa.ops.cpu.blocks import Scratch, sum_in_order
from mindspeed_dsa.ops.cpu.chunks import NOT_FINITE, Chunk, over_chunks, products_are_finite
from mindspeed_dsa.ops.cpu.products import compute_dtype, product
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall

# Keys per product, so that intermediate results stay in cache for any number of keys.
_TILE_KEYS = 256


def declines(call: IndexerCall, topk_indices: Tensor, grad_scores: Tensor) -> str | None:
    """Return why masking is unsafe, or slower than gathering keys, for this call; or None."""
    topk = topk_indices.shape[2]
    most = most_keys(call.query.shape[2], topk)
    if call.key.shape[1] > most:
        return f"it is faster up to {most / max(topk, 1):.1f} times as many keys as are selected"
    if not products_are_finite(grad_scores, call.query, call.key, call.weights):
        return NOT_FINITE
    return None


def most_keys(heads: int, topk: int) -> float:
    """Return the number of keys up to which masking is faster than gathering.

    Measured with causal rows on two busy cores of a Xeon, in processor time, as a multiple of ``topk``: 15
    with 8 heads, 8 with 16 and nearly 3 with 64.
    """
    return topk * min(16.0, 1.0 + 107 / heads)


def score_gradients(
    call: IndexerCall, topk_indices: Tensor, grad_scores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`mindspeed_dsa.ops.lightning_indexer.cpu.score_gradients` by masking."""
    query, key, weights = call.query, call.key, call.weights
    heads, dim = query.shape[2:]
    dtype = compute_dtype(query.dtype)
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)

    def work(chunks: Iterator[Chunk], scratch: Scratch) -> Tensor:
        grad_key = torch.zeros(key.shape, dtype=dtype)  # [batch, key_length, head_dim], per thread
        for chunk in chunks:
            place = (chunk.batch, chunk.rows)
            some, rows = chunk.columns.shape[:2]
            w = weights[place].to(dtype)[..., None]  # [g, rows, heads, 1]
            q, weighted = (scratch(name, some, rows * heads, dim) for name in ("q", "weighted"))
            # slopes, below, is the gradient of the products without the head's weight, and pulled is its
            # product with the keys: the gradients of query and weights follow from pulled in one step each.
            pulled = scratch("pulled", some, rows * heads, dim)
            by_head, weighted_by_head, pulled_by_head = (
                x.unflatten(1, (rows, heads)) for x in (q, weighted, pulled)
            )  # [g, rows, heads, dim]
            by_head.copy_(query[place])
            torch.mul(by_head, w, out=weighted_by_head)
            # [g, rows, heads, width], a view without memory for the heads
            grad = chunk.spread(grad_scores[place].to(dtype), scratch)[:, :, None].expand(-1, -1, heads, -1)
            total = grad_key[chunk.batch, chunk.keys]  # [g, width, dim], a view
            for tile in chunk.tiles(_TILE_KEYS):
                keys = chunk.key[:, tile]
                slopes = scratch("slopes", some, rows * heads, keys.shape[1])
                slopes_by_head = slopes.unflatten(1, (rows, heads))  # [g, rows, heads, tile keys]
                if call.use_relu:
                    product(q, keys.mT, slopes)
                    # The derivative of relu at zero is zero.
                    torch.ops.aten.threshold_backward.grad_input(
                        grad[..., tile], slopes_by_head, 0, grad_input=slopes_by_head
                    )
                else:
                    slopes_by_head.copy_(grad[..., tile])
                product(slopes, keys, pulled, add=tile.start > 0)
                product(slopes.mT, weighted, total[:, tile], add=True)
            grad_weights[place] = (by_head * pulled_by_head).sum(dim=-1)
            grad_query[place] = pulled_by_head.mul_(w)
        return grad_key

    grad_key = sum_in_order(over_chunks(key, topk_indices, heads, work, _TILE_KEYS))
    return grad_query, grad_key, grad_weights
