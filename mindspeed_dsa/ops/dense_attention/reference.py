"""Dense attention in plain PyTorch: holds ``[batch, heads, query_length, key_length]``."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.dense_attention.heads import repeated, summed
from mindspeed_dsa.ops.precision import wide


def unsupported(shape: ShapeClass) -> str | None:
    """None: the reference takes every shape."""
    return None


def forward(
    query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """See the protocol."""
    heads = query.shape[2]
    scores = _scores(query, repeated(key, heads), softmax_scale, causal)
    # [batch, heads, query_length]
    lse = scores.logsumexp(dim=-1)
    # Without keys there is nothing to sum.
    probabilities = (scores - lse[..., None]).exp()
    out = torch.einsum("bhts,bshd->bthd", probabilities, repeated(value, heads).to(scores.dtype))
    return out.to(query.dtype), lse.transpose(1, 2)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the protocol."""
    heads, kv_heads = query.shape[2], key.shape[2]
    keys, values = repeated(key, heads), repeated(value, heads)
    scores = _scores(query, keys, softmax_scale, causal)
    probabilities = (scores - lse.transpose(1, 2)[..., None].to(scores.dtype)).exp()
    grad, dtype = grad_out.to(scores.dtype), scores.dtype
    delta = (grad * out.to(dtype)).sum(dim=-1).transpose(1, 2)[..., None]
    grad_scores = probabilities * (torch.einsum("bthd,bshd->bhts", grad, values.to(dtype)) - delta)
    grad_query = softmax_scale * torch.einsum("bhts,bshd->bthd", grad_scores, keys.to(dtype))
    grad_key = softmax_scale * torch.einsum("bhts,bthd->bshd", grad_scores, query.to(dtype))
    grad_value = torch.einsum("bhts,bthd->bshd", probabilities, grad)
    return grad_query, summed(grad_key, kv_heads), summed(grad_value, kv_heads)


def _scores(query: Tensor, keys: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    """``[batch, heads, query_length, key_length]``, fp32 or wider; -inf where a row does not see a key."""
    dtype = wide(query.dtype)
    scores = softmax_scale * torch.einsum("bthd,bshd->bhts", query.to(dtype), keys.to(dtype))
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores
