"""Lightning Indexer in plain PyTorch on any device, in slabs of rows of bounded size.

The backend of `auto` on a GPU for which the Triton kernels were not made. NPUs take scores at given
entries and gradients from here where torch_npu's operators do not compute them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass, takes_every_call
from mindspeed_dsa.ops.chunks import row_chunks, scratch_product
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall
from mindspeed_dsa.ops.precision import wide
from mindspeed_dsa.ops.row_ranges import Ranges

# Bytes that the scores of a slab and their order may take, and the products of some of its keys.
_SLAB_BYTES = 256 << 20

KIND: Literal["gradients"] = "gradients"
plan_call = takes_every_call


def unsupported(shape: ShapeClass) -> str | None:
    """Return None: it takes every shape."""
    return None


def select(call: IndexerCall, topk: int, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Return indices and scores of the selected keys, ``[batch, query_length, topk]`` each."""
    query, key, weights, dtype = call.query, call.key, call.weights, wide(call.query.dtype)

    def score(b: int, rows: slice) -> Tensor:
        return _scores(query[b, rows].to(dtype), key[b], weights[b, rows].to(dtype), call.use_relu)

    return select_by(call, topk, ranges, score)


def select_by(
    call: IndexerCall, topk: int, ranges: Ranges, score: Callable[[int, slice], Tensor]
) -> tuple[Tensor, Tensor]:
    """Select by scores that a function returns for some rows at a time.

    Args:
        call: the operator's.
        topk: entries per row.
        ranges: the keys that each row sees.
        score: returns the scores of some rows of one sequence with all keys, ``[rows, keys]``.

    Returns:
        Indices and scores of the selected keys, ``[batch, query_length, topk]`` each.
    """
    query = call.query
    (batch, query_length), key_length = query.shape[:2], call.key.shape[1]
    dtype, device = wide(query.dtype), query.device
    topk_indices = torch.empty(batch, query_length, topk, dtype=torch.int32, device=device)
    topk_scores = torch.empty(batch, query_length, topk, dtype=dtype, device=device)
    if topk_indices.numel() == 0:
        return topk_indices, topk_scores
    position = torch.arange(key_length, device=device)
    # Scores, the order of all of them, and what sorting it takes.
    rows = max(1, _SLAB_BYTES // (key_length * (dtype.itemsize + 6 * 8)))
    for b in range(batch):
        for first in range(0, query_length, rows):
            at = (b, slice(first, first + rows))
            scores = score(*at)
            seen = (position >= ranges.starts[at][:, None]) & (position < ranges.ends[at][:, None])
            chosen, hidden = _ascending(*_best(scores, seen, topk), key_length)
            topk_scores[at] = scores.gather(-1, chosen.masked_fill(hidden, 0)).masked_fill_(
                hidden, -torch.inf
            )
            topk_indices[at] = chosen.masked_fill_(hidden, -1).to(torch.int32)
    return topk_indices, topk_scores


def scores_at(call: IndexerCall, topk_indices: Tensor) -> Tensor:
    """Return the scores at given entries, ``[batch, query_length, topk]`` fp32, -inf without a key."""
    query, weights = call.query, call.weights
    heads, dtype = query.shape[2], wide(query.dtype)
    out = torch.empty(topk_indices.shape, dtype=dtype, device=query.device)
    for chunk in row_chunks(call.key, topk_indices, 2 * heads):
        at = (chunk.batch, chunk.rows)
        product = scratch_product(query[at].to(dtype), chunk.keys.transpose(1, 2))
        if call.use_relu:
            product = product.relu_()
        scores = scratch_product(weights[at].to(dtype)[:, None], product)[:, 0]
        out[at] = scores.masked_fill_(chunk.invalid, -torch.inf)
    return out


def score_gradients(
    call: IndexerCall, topk_indices: Tensor, grad_scores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the scores at ``topk_indices`` with respect to query, key and weights."""
    query, key, weights = call.query, call.key, call.weights
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
        if call.use_relu:
            # The derivative of relu at zero is zero.
            grad_product = grad_product.masked_fill_(product <= 0, 0)
            product = product.relu_()
        grad_weights[at] = torch.bmm(product, grad[..., None])[..., 0].to(weights.dtype)
        grad_query[at] = torch.bmm(grad_product, chunk.keys).to(query.dtype)
        rows = torch.bmm(grad_product.transpose(1, 2), q)
        grad_key[chunk.batch].index_add_(0, chunk.indices.flatten(), rows.flatten(0, 1))
    return grad_query, grad_key, grad_weights


def _scores(query: Tensor, key: Tensor, weights: Tensor, use_relu: bool) -> Tensor:
    """Return the scores, ``[rows, heads, dim]``, ``[keys, dim]``, ``[rows, heads]`` -> ``[rows, keys]``."""
    rows, heads, dim = query.shape
    scores = query.new_empty(rows, key.shape[0])
    width = max(1, _SLAB_BYTES // (2 * max(1, rows * heads) * query.dtype.itemsize))
    flat = query.reshape(rows * heads, dim)
    for first in range(0, key.shape[0], width):
        part = slice(first, first + width)
        product = scratch_product(flat, key[part].to(query.dtype).t())
        if use_relu:
            product = product.relu_()
        scores[:, part] = torch.bmm(weights[:, None], product.view(rows, heads, -1))[:, 0]
    return scores


def _best(scores: Tensor, seen: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return positions of the best keys, best first, and whether they are seen: ``[rows, topk]`` each.

    Numbers in their order, NaN, and keys that are not seen come one after the other. Two stable sorts of
    floats say this exactly, and equal scores stay in ascending order of position: some devices sort no
    integers.
    """
    no_number = scores.isnan()
    order = scores.masked_fill(~seen | no_number, -torch.inf).sort(descending=True, stable=True).indices
    kinds = seen.to(torch.float32) - (seen & no_number).to(torch.float32) / 2
    kinds, places = kinds.gather(-1, order).sort(descending=True, stable=True)
    return order.gather(-1, places[:, :topk]), kinds[:, :topk] > 0


def _ascending(chosen: Tensor, seen: Tensor, key_length: int) -> tuple[Tensor, Tensor]:
    """Return the positions in ascending order, ``key_length`` at the tail, and where that is."""
    # fp32 holds so large a number.
    exact = torch.float32 if key_length <= 1 << 24 else torch.int64
    ascending = chosen.masked_fill(~seen, key_length).to(exact).sort().values.to(torch.int64)
    return ascending, ascending == key_length
