"""Lightning Indexer in plain PyTorch on any device, in slabs of rows of bounded size.

`auto` takes this backend on GPUs that the Triton kernels do not support. On NPUs it computes the scores of
already selected keys, and the gradients that torch_npu's operators do not support.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import takes_every_call
from mindspeed_dsa.ops.chunks import row_chunks, scratch_product
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall, pooled, pools_of
from mindspeed_dsa.ops.precision import wide
from mindspeed_dsa.ops.row_ranges import Ranges

# Bytes for the scores of a slab and their order, and bytes for the products of some of its keys.
_SLAB_BYTES = 256 << 20

KIND: Literal["gradients"] = "gradients"
plan_call = unsupported = takes_every_call


def select(call: IndexerCall, topk: int, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Return indices and scores of the selected keys, ``[batch, query_length, topk]`` each."""
    query, key, weights, dtype = call.query, call.key, call.weights, wide(call.query.dtype)

    def score(b: int, rows: slice) -> Tensor:
        scores = _scores(query[b, rows].to(dtype), key[b], weights[b, rows].to(dtype), call.use_relu)
        if call.pool == 1:
            return scores
        return pooled(scores, ranges.starts[b, rows], ranges.ends[b, rows], call.pool)

    seen = ranges if call.pool == 1 else pools_of(ranges, call.pool)
    return select_by(call, topk, seen, score)


def select_by(
    call: IndexerCall, topk: int, ranges: Ranges, score: Callable[[int, slice], Tensor]
) -> tuple[Tensor, Tensor]:
    """Select the best keys, with scores from a callback that computes some rows at a time.

    Args:
        call: arguments of the operator.
        topk: number of entries per row.
        ranges: ranges of the keys that each row sees.
        score: function of a sequence's number and a slice of its rows, which returns their scores with all
            keys, ``[rows, keys]``; with pools, ``ranges`` and scores belong to pools.

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
    choices = -(-key_length // call.pool)  # keys, or pools
    position = torch.arange(choices, device=device)
    # Bytes per key of a row: the scores, and six int64 of the sort for its order and workspace.
    rows = max(1, _SLAB_BYTES // (key_length * (dtype.itemsize + 6 * 8)))
    for b in range(batch):
        for first in range(0, query_length, rows):
            place = (b, slice(first, first + rows))
            scores = score(*place)  # [rows, choices]
            seen = (position >= ranges.starts[place][:, None]) & (position < ranges.ends[place][:, None])
            selected, hidden = _ascending(*_best(scores, seen, topk), choices)  # [rows, topk] each
            topk_scores[place] = scores.gather(-1, selected.masked_fill(hidden, 0)).masked_fill_(
                hidden, -torch.inf
            )
            topk_indices[place] = selected.masked_fill_(hidden, -1).to(torch.int32)
    return topk_indices, topk_scores


def scores_at(call: IndexerCall, topk_indices: Tensor) -> Tensor:
    """Return ``[batch, query_length, topk]`` scores of the keys in ``topk_indices``, -inf without a key."""
    query, weights = call.query, call.weights
    heads, dtype = query.shape[2], wide(query.dtype)
    out = torch.empty(topk_indices.shape, dtype=dtype, device=query.device)  # [batch, query_length, topk]
    for chunk in row_chunks(call.key, topk_indices, 2 * heads):
        place = (chunk.batch, chunk.rows)
        product = scratch_product(query[place].to(dtype), chunk.keys.transpose(1, 2))  # [n, heads, topk]
        if call.use_relu:
            product = product.relu_()
        # [n, 1, heads] @ [n, heads, topk] -> [n, topk]
        scores = scratch_product(weights[place].to(dtype)[:, None], product)[:, 0]
        out[place] = scores.masked_fill_(chunk.invalid, -torch.inf)
    return out


def score_gradients(
    call: IndexerCall, topk_indices: Tensor, grad_scores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the scores at ``topk_indices`` with respect to query, key and weights."""
    query, key, weights = call.query, call.key, call.weights
    heads, dtype = query.shape[2], wide(query.dtype)
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    grad_key = torch.zeros(key.shape, dtype=dtype, device=key.device)  # [batch, key_length, head_dim]
    for chunk in row_chunks(key, topk_indices, 4 * heads + key.shape[2]):
        place = (chunk.batch, chunk.rows)
        q, w = query[place].to(dtype), weights[place].to(dtype)
        grad = grad_scores[place].to(dtype).masked_fill(chunk.invalid, 0)
        product = torch.bmm(q, chunk.keys.transpose(1, 2))  # [n, heads, topk]
        grad_product = w[..., None] * grad[:, None]  # [n, heads, topk]
        if call.use_relu:
            # The derivative of relu at zero is zero.
            grad_product = grad_product.masked_fill_(product <= 0, 0)
            product = product.relu_()
        grad_weights[place] = torch.bmm(product, grad[..., None])[..., 0].to(weights.dtype)  # [n, heads]
        grad_query[place] = torch.bmm(grad_product, chunk.keys).to(query.dtype)  # [n, heads, head_dim]
        rows = torch.bmm(grad_product.transpose(1, 2), q)  # [n, topk, head_dim]
        grad_key[chunk.batch].index_add_(0, chunk.indices.flatten(), rows.flatten(0, 1))
    return grad_query, grad_key, grad_weights


def _scores(query: Tensor, key: Tensor, weights: Tensor, use_relu: bool) -> Tensor:
    """Return the scores: ``[rows, heads, dim]``, ``[keys, dim]``, ``[rows, heads]`` -> ``[rows, keys]``."""
    rows, heads, dim = query.shape
    scores = query.new_empty(rows, key.shape[0])
    width = max(1, _SLAB_BYTES // (2 * max(1, rows * heads) * query.dtype.itemsize))
    flat = query.reshape(rows * heads, dim)  # [rows * heads, dim]
    for first in range(0, key.shape[0], width):
        part = slice(first, first + width)
        product = scratch_product(flat, key[part].to(query.dtype).t())  # [rows * heads, width]
        if use_relu:
            product = product.relu_()
        # [rows, 1, heads] @ [rows, heads, width] -> [rows, width]
        scores[:, part] = torch.bmm(weights[:, None], product.view(rows, heads, -1))[:, 0]
    return scores


def _best(scores: Tensor, seen: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return ``[rows, topk]`` positions of the best keys, best first, and a mask of the visible ones.

    Keys are ordered by descending score, then NaN scores, then keys that are not visible. Two stable sorts
    give exactly this order, and keep equal scores in ascending order of position. They sort floats because
    some devices cannot sort integers.
    """
    no_number = scores.isnan()
    order = scores.masked_fill(~seen | no_number, -torch.inf).sort(descending=True, stable=True).indices
    # 1 for numbers, 1/2 for NaN, 0 for keys that are not seen.
    kinds = seen.to(torch.float32) - (seen & no_number).to(torch.float32) / 2
    kinds, places = kinds.gather(-1, order).sort(descending=True, stable=True)  # [rows, key_length] each
    return order.gather(-1, places[:, :topk]), kinds[:, :topk] > 0


def _ascending(chosen: Tensor, seen: Tensor, key_length: int) -> tuple[Tensor, Tensor]:
    """Sort positions, with ``key_length`` at the tail for invisible keys; also return the tail's mask."""
    # fp32 represents integers up to 2^24 exactly; see `_best` for sorting floats.
    exact = torch.float32 if key_length <= 1 << 24 else torch.int64
    ascending = chosen.masked_fill(~seen, key_length).to(exact).sort().values.to(torch.int64)
    return ascending, ascending == key_length
