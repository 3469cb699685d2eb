"""Sparse flash attention: every query row attends to its selected keys only, in absorbed MLA form.

The mathematics is in README.md beside this file.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass, choose
from mindspeed_dsa.ops.checks import check_float, check_indices, check_shape, require

OPERATOR = "sparse_flash_attention"


class SparseAttentionOutput(NamedTuple):
    """What the attention returns; only ``out`` is differentiable."""

    out: Tensor
    """``[batch, query_length, heads, value_dim]`` in the dtype of the query; zero in rows without a key."""
    lse: Tensor
    """``[batch, query_length, heads]`` fp32, natural log of the sum of exp(scores); -inf without a key."""
    attention_sum: Tensor | None
    """``[batch, query_length, topk]`` fp32, probabilities summed over this rank's heads, 0 where the index is
    -1: the target of the indexer loss before normalisation. None unless asked for."""


def sparse_flash_attention(
    query: Tensor,
    key_value: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    *,
    value_dim: int,
    return_attention_sum: bool = False,
    backend: str = "auto",
) -> SparseAttentionOutput:
    """Attention of every query head over the keys its row selected, with one shared key-value head.

    ``out[t, h] = sum_s p[t, h, s] * key_value[s, :value_dim]`` with ``p = softmax over the selected s`` of
    ``softmax_scale * query[t, h] . key_value[s]``. The value is the leading (latent) part of the key; its
    gradient and the key's are added. Gradients are deterministic in the reference and on CPU.

    Args:
        query: ``[batch, query_length, heads, dim]``, any number of heads from 1, any strides; for MLA the
            query absorbed into the latent space followed by its rotary part, ``dim = 512 + 64``.
        key_value: ``[batch, key_length, dim]``, latent followed by the rotary key.
        topk_indices: ``[batch, query_length, topk]`` int32 key positions without duplicates, -1 at the tail,
            otherwise in any order. Visibility (causal, packed) is the caller's: the indices say it all.
        softmax_scale: factor of the scores. For MLA that of the unabsorbed heads, ``192 ** -0.5`` times the
            square of the YaRN factor, not ``576 ** -0.5``.
        value_dim: leading part of ``key_value`` that is the value, 512 for MLA.
        return_attention_sum: also return the probabilities summed over heads.
        backend: see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Raises:
        ValueError: a shape or dtype does not fit.
        BackendUnavailable: the backend asked for cannot take the call.

    Source: DeepSeek-V2 paper, section 2.1 (absorbed MLA); DeepSeek-V3.2-Exp report, section 2.1.
    """
    check_shape(OPERATOR, "query", query, (None,) * 4, "[batch, query_length, heads, dim]")
    batch, query_length, heads, dim = query.shape
    check_shape(OPERATOR, "key_value", key_value, (batch, None, dim), f"[{batch}, key_length, {dim}]")
    check_shape(
        OPERATOR,
        "topk_indices",
        topk_indices,
        (batch, query_length, None),
        f"[{batch}, {query_length}, topk]",
    )
    check_float(OPERATOR, query=query, key_value=key_value)
    require(
        topk_indices.dtype in (torch.int32, torch.int64) and topk_indices.device == query.device,
        OPERATOR,
        f"topk_indices must be int32 on {query.device}, got {topk_indices.dtype} on {topk_indices.device}",
    )
    require(heads >= 1, OPERATOR, "query must have at least one head")
    require(1 <= value_dim <= dim, OPERATOR, f"value_dim must lie in [1, {dim}], got {value_dim}")
    check_indices(OPERATOR, topk_indices, key_value.shape[1])
    shape = ShapeClass(
        query.device.type,
        query.dtype,
        (("heads", heads), ("dim", dim), ("value_dim", value_dim), ("topk", topk_indices.shape[-1])),
    )
    implementation = choose(OPERATOR, backend, shape)
    arguments = (query, key_value, topk_indices, softmax_scale, value_dim, return_attention_sum)
    if not hasattr(implementation, "backward"):
        return SparseAttentionOutput(*implementation.sparse_flash_attention(*arguments))
    return SparseAttentionOutput(*_Attention.apply(implementation, *arguments))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        implementation: ModuleType,
        query: Tensor,
        key_value: Tensor,
        topk_indices: Tensor,
        softmax_scale: float,
        value_dim: int,
        return_attention_sum: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        out, lse, attention_sum = implementation.forward(
            query, key_value, topk_indices, softmax_scale, value_dim, return_attention_sum
        )
        ctx.implementation, ctx.softmax_scale = implementation, softmax_scale
        ctx.save_for_backward(query, key_value, topk_indices, out, lse)
        ctx.mark_non_differentiable(lse, *(() if attention_sum is None else (attention_sum,)))
        ctx.set_materialize_grads(False)
        return out, lse, attention_sum

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad_out is None:
            return (None,) * 7
        grads = ctx.implementation.backward(grad_out, *ctx.saved_tensors, ctx.softmax_scale)
        return (None, *grads, None, None, None, None)
