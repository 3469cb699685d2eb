"""Lightning Indexer in plain PyTorch: all scores at once, a stable sort, autograd."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.ops.backend import takes_every_call
from mindspeed_dsa.ops.checks import names_key
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall, pooled, pools_of
from mindspeed_dsa.ops.precision import wide
from mindspeed_dsa.ops.row_ranges import Ranges

KIND: Literal["autograd"] = "autograd"
plan_call = unsupported = takes_every_call


def all_scores(call: IndexerCall) -> Tensor:
    """Return the scores of all queries with all keys, unmasked: ``[batch, query_length, key_length]``."""
    dtype = wide(call.query.dtype)
    # [batch, query_length, heads, key_length]
    products = torch.einsum("bshd,btd->bsht", call.query.to(dtype), call.key.to(dtype))
    if call.use_relu:
        products = products.relu()
    # [batch, query_length, key_length]
    return torch.einsum("bsht,bsh->bst", products, call.weights.to(dtype))


def visible(starts: Tensor, ends: Tensor, key_length: int) -> Tensor:
    """Return whether each row sees each key, ``[batch, query_length, key_length]`` bool."""
    position = torch.arange(key_length, device=starts.device)
    return (position >= starts[..., None]) & (position < ends[..., None])


def lightning_indexer(call: IndexerCall, topk: int, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Return indices and scores of the selected keys, ``[batch, query_length, topk]`` each."""
    scores = all_scores(call)
    if call.pool > 1:
        scores = pooled(scores.clone(), ranges.starts, ranges.ends, call.pool)
        ranges = pools_of(ranges, call.pool)
    topk_indices = best_keys(scores, topk, ranges)
    return topk_indices, _gather(scores, topk_indices)


def best_keys(scores: Tensor, topk: int, ranges: Ranges) -> Tensor:
    """Return the positions of the visible keys with the highest scores, ascending, -1 at the tail.

    Shapes: ``[batch, query_length, key_length]`` scores give ``[batch, query_length, topk]`` int32.
    """
    key_length = scores.shape[-1]
    hidden = ~visible(ranges.starts, ranges.ends, key_length)
    # A stable sort keeps equal scores in ascending order of position. A second stable sort by kind keeps the
    # order of the first within each kind: numbers, then NaN, then keys that the row does not see.
    numbers = scores.detach().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    order = numbers.sort(dim=-1, descending=True, stable=True).indices  # [batch, query_length, key_length]
    kind = torch.where(hidden, 2, scores.isnan().to(torch.int64))
    # [batch, query_length, topk]
    best = order.gather(-1, kind.gather(-1, order).sort(dim=-1, stable=True).indices)[..., :topk]
    # Hidden keys become key_length, which the ascending sort moves to the tail, and then -1.
    best = best.masked_fill(hidden.gather(-1, best), key_length).sort(dim=-1).values
    return best.masked_fill(best == key_length, -1).to(torch.int32)


def selected_scores(call: IndexerCall, topk_indices: Tensor) -> Tensor:
    """Return the scores of the keys in ``topk_indices``, ``[batch, query_length, topk]``."""
    return _gather(all_scores(call), topk_indices)


def _gather(scores: Tensor, topk_indices: Tensor) -> Tensor:
    keys = scores.shape[-1]
    # Entries that name no key read an additional last column of -inf.
    index = topk_indices.long().masked_fill(~names_key(topk_indices, keys), keys)
    return F.pad(scores, (0, 1), value=-torch.inf).gather(-1, index)  # [batch, query_length, topk]
