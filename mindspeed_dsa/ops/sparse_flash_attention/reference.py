"""Sparse flash attention in plain PyTorch: gather all selected keys, softmax, autograd."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.ops.backend import takes_every_call
from mindspeed_dsa.ops.checks import names_key
from mindspeed_dsa.ops.precision import wide
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall

KIND: Literal["autograd"] = "autograd"
plan_call = unsupported = takes_every_call


def sparse_flash_attention(call: AttentionCall, with_sum: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the three fields of :class:`SparseAttentionOutput`."""
    query, key_value, topk_indices = call.query, call.key_value, call.topk_indices
    dtype = wide(query.dtype)
    key_length = key_value.shape[1]
    valid = names_key(topk_indices, key_length)  # [batch, query_length, topk]
    batch = torch.arange(query.shape[0], device=query.device)[:, None, None]  # [batch, 1, 1]
    # Entries that name no key read a row of zeros, appended after the last key.
    index = topk_indices.long().masked_fill(~valid, key_length)
    keys = F.pad(key_value.to(dtype), (0, 0, 0, 1))[batch, index]  # [batch, query_length, topk, dim]
    # [batch, query_length, heads, topk]
    scores = call.softmax_scale * torch.einsum("bshd,bskd->bshk", query.to(dtype), keys)
    scores = scores.masked_fill(~valid[:, :, None], -torch.inf)
    lse = scores.detach().logsumexp(dim=-1)  # [batch, query_length, heads]
    if call.sink is not None:
        lse = torch.logaddexp(lse, call.sink.detach())
        # The sink is one more key, last and without a value.
        scores = torch.cat([scores, call.sink[:, None].expand(*scores.shape[:3], 1)], dim=-1)
    # The softmax of a row without a key would be 0/0: its scores are made finite first, its probabilities
    # zero.
    empty = ~valid.any(dim=-1)[:, :, None, None]  # [batch, query_length, 1, 1]
    probabilities = scores.masked_fill(empty, 0).softmax(dim=-1).masked_fill(empty, 0)
    probabilities = probabilities[..., : valid.shape[-1]]  # [batch, query_length, heads, topk]
    # [batch, query_length, heads, value_dim]
    out = torch.einsum("bshk,bskd->bshd", probabilities, keys[..., : call.value_dim])
    attention_sum = probabilities.detach().sum(dim=2) if with_sum else None  # [batch, query_length, topk]
    return out.to(query.dtype), lse, attention_sum
