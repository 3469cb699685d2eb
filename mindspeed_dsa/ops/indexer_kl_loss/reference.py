"""Indexer loss in plain PyTorch: the divergence written out, autograd for the gradient."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.ops.backend import takes_every_call
from mindspeed_dsa.ops.indexer_kl_loss.protocol import DenseCall
from mindspeed_dsa.ops.lightning_indexer.reference import all_scores, visible
from mindspeed_dsa.ops.precision import wide
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall, softmax
from mindspeed_dsa.ops.sparse_flash_attention.reference import sparse_flash_attention

KIND: Literal["autograd"] = "autograd"
plan_dense = unsupported = takes_every_call


def attention_sum(call: AttentionCall, lse: Tensor | None) -> Tensor:
    """Return the main attention over the selected keys, summed over this rank's heads; ``lse`` is unused."""
    summed = sparse_flash_attention(call, True)[2]
    assert summed is not None
    return summed


def divergence(topk_scores: Tensor, attention_sum: Tensor, valid: Tensor, row_weights: Tensor) -> Tensor:
    """Return ``sum_rows row_weight * sum_s p (log p - log r)`` over the last axis where ``valid``."""
    counts = valid.any(dim=-1, keepdim=True)  # [batch, query_length, 1]: whether the row has a key
    # Rows without a key would be 0/0; their scores and sums get finite stand-ins, and their terms are masked.
    scores = topk_scores.masked_fill(~valid, -torch.inf).masked_fill(~counts, 0)
    log_r = scores.log_softmax(dim=-1).masked_fill(~valid, 0)
    p = attention_sum / attention_sum.sum(dim=-1, keepdim=True).masked_fill(~counts, 1)
    per_row = (torch.xlogy(p, p) - p * log_r).masked_fill(~valid, 0).sum(dim=-1)  # [batch, query_length]
    return (per_row * row_weights).sum().to(topk_scores.dtype)


def dense_loss(call: DenseCall) -> Tensor:
    """Return the divergence over all visible keys."""
    query, key, dtype = call.query, call.key, wide(call.query.dtype)
    valid = visible(call.ranges.starts, call.ranges.ends, key.shape[1])  # [batch, query_length, key_length]
    # [batch, key_length, heads, dim]
    per_head_key = key if key.dim() == 4 else key[:, :, None].expand(-1, -1, query.shape[2], -1)
    # [batch, query_length, heads, key_length]
    scores = call.softmax_scale * torch.einsum("bshd,bthd->bsht", query.to(dtype), per_head_key.to(dtype))
    empty = ~valid.any(dim=-1)[:, :, None, None]  # [batch, query_length, 1, 1]
    scores = scores.masked_fill(~valid[:, :, None], -torch.inf).masked_fill(empty, 0)
    summed = softmax(scores, call.sink).masked_fill(empty, 0).sum(dim=2)  # [batch, query_length, key_length]
    if call.tp_group is not None:
        dist.all_reduce(summed, group=call.tp_group)
    return divergence(all_scores(call.index), summed, valid, call.row_weights)
