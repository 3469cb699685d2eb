"""Lightning Indexer on CPU: scores streamed in slabs of rows, selection on unique integer keys.

A slab holds the scores of a few rows with the keys that any of them sees, so memory is O(length) beside
the result. The fp32 score and the key position are packed into one int64 whose order is "higher score
first, then lower position". Such keys are unique, which makes any top-k algorithm deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass, takes_every_call
from mindspeed_dsa.ops.cpu_blocks import (
    Block,
    Scratch,
    add_to_keys,
    compute_dtype,
    linear,
    one_by_one,
    over_blocks,
    sum_in_order,
    sum_of_keys,
    times_keys,
)
from mindspeed_dsa.ops.cpu_threads import share_out

# Rows per slab and keys per product: the products of a slab, [rows * heads, keys], stay in cache.
_PRODUCT_ELEMENTS = 512 * 1024
_FEWEST_ROWS, _MOST_ROWS = 16, 64
# Slab widths are rounded up, so that the number of distinct product shapes stays small.
_WIDTH_STEP = 256
_LAST = 2**31 - 1

KIND: Literal["gradients"] = "gradients"
plan_call = takes_every_call


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
    return None if shape.device == "cpu" else "it runs on CPU tensors only"


def select(
    query: Tensor, key: Tensor, weights: Tensor, topk: int, starts: Tensor, ends: Tensor, use_relu: bool
) -> tuple[Tensor, Tensor]:
    """Indices and scores of the selected keys, ``[batch, query_length, topk]`` each."""
    batch, query_length = query.shape[:2]
    topk_indices = torch.empty(batch, query_length, topk, dtype=torch.int32)
    dtype = compute_dtype(query.dtype)
    topk_scores = torch.empty(batch, query_length, topk, dtype=dtype)
    keys = [one.detach().to(dtype).contiguous() for one in key]
    rows = _slab_rows(query.shape[2] * key.shape[1])
    slabs = [
        (b, slice(number * rows, (number + 1) * rows), low, high)
        for b in range(batch)
        for number, (low, high) in enumerate(_bounds(starts[b], ends[b], rows))
    ]

    def work(share: Sequence[tuple[int, slice, int, int]]) -> None:
        for b, part, low, high in share:
            row_starts, row_ends = starts[b, part, None], ends[b, part, None]
            # Never wider than the keys, never narrower than the selection.
            high = min(key.shape[1], max(low + -(-(high - low) // _WIDTH_STEP) * _WIDTH_STEP, low + topk))
            low = max(0, min(low, high - topk))
            q, w = query[b, part].to(dtype), weights[b, part].to(dtype)
            scores = _scores(q, keys[b][low:high], w, use_relu)
            position = torch.arange(low, high, dtype=torch.int32)
            chosen = _choose(scores, (position < row_starts) | (position >= row_ends), position, topk)
            hidden = (chosen < row_starts) | (chosen >= row_ends)
            chosen = chosen.masked_fill_(hidden, _LAST).sort(dim=-1).values
            hidden = chosen == _LAST
            columns = (chosen - low).masked_fill_(hidden, 0)
            topk_scores[b, part] = scores.gather(-1, columns.long()).masked_fill_(hidden, -torch.inf)
            topk_indices[b, part] = chosen.masked_fill_(hidden, -1)

    share_out(slabs, work)
    return topk_indices, topk_scores


def _slab_rows(products_per_row: int) -> int:
    """As many as keep the products in cache: over few keys, calls cost more than the work of a few rows."""
    return min(max(_PRODUCT_ELEMENTS // max(products_per_row, 1), _FEWEST_ROWS), _MOST_ROWS)


def _bounds(starts: Tensor, ends: Tensor, rows: int) -> list[tuple[int, int]]:
    """Smallest range of keys that holds what each slab of rows sees."""
    sees = starts < ends
    low = torch.where(sees, starts, _LAST).split(rows)
    high = torch.where(sees, ends, 0).split(rows)
    bounds = [(int(a.min()), int(z.max())) for a, z in zip(low, high, strict=True)]
    return [(a, z) if a < z else (0, 0) for a, z in bounds]


def _scores(query: Tensor, key: Tensor, weights: Tensor, use_relu: bool) -> Tensor:
    """``[rows, heads, dim]``, ``[keys, dim]``, ``[rows, heads]`` -> ``[rows, keys]``."""
    rows, heads, dim = query.shape
    scores = query.new_empty(rows, key.shape[0])
    width = max(_WIDTH_STEP, _PRODUCT_ELEMENTS // (rows * heads) // _WIDTH_STEP * _WIDTH_STEP)
    flat = query.reshape(rows * heads, dim)
    for first in range(0, key.shape[0], width):
        part = slice(first, first + width)
        # [rows * heads, width], in cache
        product = linear(flat, key[part], relu=use_relu).view(rows, heads, -1)
        scores[:, part] = torch.bmm(weights[:, None], product)[:, 0]
    return scores


def _choose(scores: Tensor, hidden: Tensor, position: Tensor, topk: int) -> Tensor:
    """Positions of the ``topk`` highest scores of each row, in any order: int32 ``[rows, topk]``.

    NaN comes after every number, and what is ``hidden`` after all.
    """
    if topk == scores.shape[1]:
        return position.expand(scores.shape).contiguous()
    integer = torch.int32 if scores.dtype == torch.float32 else torch.int64
    limits = torch.iinfo(integer)
    # -0.0 equals 0.0 as a score but not as bits. In two's complement, flipping the magnitude bits of
    # negative floats makes the integer order the float order.
    bits = (scores + 0.0).view(integer)
    ordered = bits ^ ((bits >> (limits.bits - 1)) & limits.max)
    # Bits that only NaN has otherwise.
    ordered.masked_fill_(scores.isnan(), limits.min + 1).masked_fill_(hidden, limits.min)
    if integer == torch.int64:
        # No integer holds an fp64 score and a position.
        return position[ordered.sort(dim=-1, descending=True, stable=True).indices[:, :topk]]
    packed = (ordered.to(torch.int64) << 32) | (_LAST - position)
    best = packed.topk(topk, dim=-1, sorted=False).values
    return (_LAST - (best & _LAST)).to(torch.int32)


def scores_at(query: Tensor, key: Tensor, weights: Tensor, topk_indices: Tensor, use_relu: bool) -> Tensor:
    """Scores at given entries: ``[batch, query_length, topk]``."""
    heads, dtype = query.shape[2], compute_dtype(query.dtype)
    out = torch.full(topk_indices.shape, -torch.inf, dtype=dtype)

    def work(blocks: Iterator[Block], scratch: Scratch) -> None:
        for block in blocks:
            at, (rows, width) = (block.batch, block.rows), block.indices.shape
            product, q = scratch("product", rows, heads, width), query[at].to(dtype)
            single = one_by_one(2 * heads * key.shape[2] * width, dtype)
            for keys, _, _, (q_, product_) in block.tiles(q, product):
                times_keys(q_, keys, product_, single)
            if use_relu:
                product.relu_()
            scores = torch.bmm(weights[at].to(dtype)[:, None], product)[:, 0]
            if block.invalid is not None:
                scores.masked_fill_(block.invalid, -torch.inf)
            out[at][:, :width] = scores

    over_blocks(key, topk_indices, heads, work)
    return out


def score_gradients(
    grad_scores: Tensor, query: Tensor, key: Tensor, weights: Tensor, topk_indices: Tensor, use_relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the scores at ``topk_indices`` with respect to query, key and weights."""
    heads, dtype = query.shape[2], compute_dtype(query.dtype)
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)

    def work(blocks: Iterator[Block], scratch: Scratch) -> Tensor:
        grad_key = torch.zeros(key.shape, dtype=dtype)
        for block in blocks:
            at, (rows, width) = (block.batch, block.rows), block.indices.shape
            q, w = query[at].to(dtype), weights[at].to(dtype)[..., None]
            grad = grad_scores[at][:, None, :width].to(dtype)
            if block.invalid is not None:
                grad = grad.masked_fill(block.invalid[:, None], 0)
            weighted = torch.mul(q, w, out=scratch("weighted", *q.shape))
            # Gradient of the products without the weight of the head, and its product with the keys: the
            # gradients of query and weights are both one step from it.
            grad_product = scratch("grad_product", rows, heads, width)
            pulled = scratch("pulled", *q.shape)
            single = one_by_one(2 * heads * key.shape[2] * width, dtype)
            for keys, indices, _, (q_, grad_, slopes, pulled_, weighted_) in block.tiles(
                q, grad, grad_product, pulled, weighted
            ):
                if use_relu:
                    # The derivative of relu at zero is zero.
                    product = scratch("product", *slopes.shape)
                    times_keys(q_, keys, product, single)
                    torch.ops.aten.threshold_backward.grad_input(
                        grad_.expand_as(product), product, 0, grad_input=slopes
                    )
                else:
                    slopes.copy_(grad_.expand_as(slopes))
                sum_of_keys(slopes, keys, pulled_, single)
                add_to_keys(grad_key[block.batch], indices, slopes, weighted_, scratch, single)
            grad_weights[at] = (q * pulled).sum(dim=-1)
            grad_query[at] = pulled.mul_(w)
        return grad_key

    grad_key = sum_in_order(over_blocks(key, topk_indices, heads, work))
    return grad_query, grad_key.to(key.dtype), grad_weights
