"""Lightning Indexer in plain PyTorch on any device, in slabs of rows of bounded size.

What `auto` takes on a GPU for which the Triton kernels were not made.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass, takes_every_call
from mindspeed_dsa.ops.chunks import score_gradients as score_gradients
from mindspeed_dsa.ops.chunks import scores_at as scores_at
from mindspeed_dsa.ops.chunks import wide

# Bytes that the scores of a slab and their order may take, and the products of some of its keys.
_SLAB_BYTES = 256 << 20
_HIDDEN = torch.iinfo(torch.int64).min

KIND: Literal["gradients"] = "gradients"
plan_call = takes_every_call


def unsupported(shape: ShapeClass) -> str | None:
    """None: it takes every shape."""
    return None


def select(
    query: Tensor, key: Tensor, weights: Tensor, topk: int, starts: Tensor, ends: Tensor, use_relu: bool
) -> tuple[Tensor, Tensor]:
    """Indices and scores of the selected keys, ``[batch, query_length, topk]`` each."""
    (batch, query_length), key_length = query.shape[:2], key.shape[1]
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
            scores = _scores(query[at].to(dtype), key[b], weights[at].to(dtype), use_relu)
            seen = (position >= starts[at][:, None]) & (position < ends[at][:, None])
            # Stable: equal scores stay in ascending order of position.
            best, chosen = _order(scores).masked_fill_(~seen, _HIDDEN).sort(descending=True, stable=True)
            chosen = chosen[:, :topk].masked_fill(best[:, :topk] == _HIDDEN, key_length).sort().values
            hidden = chosen == key_length
            topk_scores[at] = scores.gather(-1, chosen.masked_fill(hidden, 0)).masked_fill_(
                hidden, -torch.inf
            )
            topk_indices[at] = chosen.masked_fill_(hidden, -1).to(torch.int32)
    return topk_indices, topk_scores


def _scores(query: Tensor, key: Tensor, weights: Tensor, use_relu: bool) -> Tensor:
    """``[rows, heads, dim]``, ``[keys, dim]``, ``[rows, heads]`` -> ``[rows, keys]``."""
    rows, heads, dim = query.shape
    scores = query.new_empty(rows, key.shape[0])
    width = max(1, _SLAB_BYTES // (2 * max(1, rows * heads) * query.dtype.itemsize))
    flat = query.reshape(rows * heads, dim)
    for first in range(0, key.shape[0], width):
        part = slice(first, first + width)
        product = torch.mm(flat, key[part].to(query.dtype).t())
        if use_relu:
            product = product.relu_()
        scores[:, part] = torch.bmm(weights[:, None], product.view(rows, heads, -1))[:, 0]
    return scores


def _order(scores: Tensor) -> Tensor:
    """int64 in the order of the scores: -0.0 and 0.0 give the same one, NaN one below that of -inf."""
    bits = (scores.double() + 0.0).view(torch.int64)
    # In two's complement, flipping the magnitude of negative floats makes the integer order the float order.
    ordered = bits ^ ((bits >> 63) & torch.iinfo(torch.int64).max)
    return ordered.masked_fill_(scores.isnan(), _HIDDEN + 1)
