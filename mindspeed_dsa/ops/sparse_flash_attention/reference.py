"""Sparse flash attention in plain PyTorch: gather all selected keys, softmax, autograd."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass, takes_every_call
from mindspeed_dsa.ops.indices import names_key

KIND: Literal["autograd"] = "autograd"
plan_call = takes_every_call


def unsupported(shape: ShapeClass) -> str | None:
    """None: the reference takes every shape."""
    return None


def sparse_flash_attention(
    query: Tensor,
    key_value: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    value_dim: int,
    return_attention_sum: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The three parts of :class:`SparseAttentionOutput`."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    key_length = key_value.shape[1]
    valid = names_key(topk_indices, key_length)
    batch = torch.arange(query.shape[0], device=query.device)[:, None, None]
    # [batch, query_length, topk, dim]; an entry that names no key finds zeros, behind the last key.
    at = topk_indices.long().masked_fill(~valid, key_length)
    keys = F.pad(key_value.to(dtype), (0, 0, 0, 1))[batch, at]
    scores = softmax_scale * torch.einsum("bshd,bskd->bshk", query.to(dtype), keys)
    scores = scores.masked_fill(~valid[:, :, None], -torch.inf)
    lse = scores.detach().logsumexp(dim=-1)
    # A row without a key would be 0/0: its scores are made finite first and its probabilities zero.
    empty = ~valid.any(dim=-1)[:, :, None, None]
    probabilities = scores.masked_fill(empty, 0).softmax(dim=-1).masked_fill(empty, 0)
    out = torch.einsum("bshk,bskd->bshd", probabilities, keys[..., :value_dim])
    attention_sum = probabilities.detach().sum(dim=2) if return_attention_sum else None
    return out.to(query.dtype), lse, attention_sum
