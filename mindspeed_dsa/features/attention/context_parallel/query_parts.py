"""Latent attention whose queries come in two parts, as an operator on NPUs takes them.

The part without position and the rotary part are projected apart, and would be copied to be put together, in
forward and in backward. The rotary part passes through Megatron's layer behind the latents.

Imports nothing of Megatron: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.features.attention.context_parallel.dense import DenseAttention, FromLatents
from mindspeed_dsa.ops.dense_attention import attention_of_parts, attention_of_parts_backward


def beside_latents(plain: Tensor, rotary: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Return what passes for query and key through Megatron's layer.

    Args:
        plain: ``[s, b, heads, plain]``, the query without its rotary part.
        rotary: ``[s, b, heads, rope]``, that part.
        latents: ``[s, b, 1, latent + rope]``.
    """
    # Whoever frees what is recomputed frees this, and no copy that Megatron's layer makes of it.
    return plain.contiguous(), torch.cat([latents, rotary.flatten(2).unsqueeze(2)], dim=-1)


def parts_of(config: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the latents, and the query's rotary part if it lies behind them: see :func:`beside_latents`."""
    width = config.kv_lora_rank + config.qk_pos_emb_head_dim
    if key.size(-1) == width:
        return key, None
    latents, rotary = key.split([width, key.size(-1) - width], dim=-1)
    return latents, rotary.squeeze(2).unflatten(-1, (query.size(2), -1))


def attend_in_parts(
    inner: DenseAttention,
    query: Tensor,
    query_rope: Tensor,
    rows: Tensor,
    expansion: FromLatents,
    weight: Tensor,
) -> Tensor:
    """Attend causally on one rank, to as many latents as there are queries.

    Args:
        inner: factor of scores, and backend.
        query: ``[rows, b, heads, plain]``.
        query_rope: ``[rows, b, heads, rope]``.
        rows: ``[rows, b, 1, latent + rope]``.
        expansion: sizes of keys and values of latents.
        weight: ``[heads * (plain + value_dim), latent]``, by head.

    Returns:
        ``[rows, b, heads, value_dim]``.
    """
    out: Tensor = _InParts.apply(query, query_rope, rows, weight, expansion, inner)
    return out


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        query_rope: Tensor,
        rows: Tensor,
        weight: Tensor,
        expansion: FromLatents,
        inner: DenseAttention,
    ) -> Tensor:
        operands = _operands(query, query_rope, rows, _halves(expansion, weight), expansion)
        out, statistics = attention_of_parts(*operands, inner.softmax_scale, backend=inner.backend)
        ctx.save_for_backward(query, query_rope, rows, weight, out, statistics)
        ctx.expansion, ctx.inner = expansion, inner
        return out.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, query_rope, rows, weight, out, statistics = ctx.saved_tensors
        expansion, inner = ctx.expansion, ctx.inner
        halves = _halves(expansion, weight)
        gradients = attention_of_parts_backward(
            grad_out.transpose(0, 1),
            *_operands(query, query_rope, rows, halves, expansion),
            out,
            statistics,
            inner.softmax_scale,
            backend=inner.backend,
        )
        of_query, of_rope, of_plain, of_rotary, of_value = (one.to(query.dtype) for one in gradients)
        latent = rows[..., : expansion.latent].transpose(0, 1).flatten(0, 2)
        # [b * keys, heads * dim] each
        plain, value = (one.flatten(0, 1).flatten(1) for one in (of_plain, of_value))
        of_latent = torch.addmm(torch.mm(plain, halves[0]), value, halves[1]).view(*of_rotary.shape[:3], -1)
        of_weight = [torch.mm(one.t(), latent).unflatten(0, (expansion.heads, -1)) for one in (plain, value)]
        return (
            of_query.transpose(0, 1),
            of_rope.transpose(0, 1),
            torch.cat([of_latent, of_rotary], dim=-1).transpose(0, 1),
            torch.cat(of_weight, dim=1).flatten(0, 1),
            None,
            None,
        )


def _halves(expansion: FromLatents, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of keys and of values; copies, but those of what they make would be larger."""
    by_head = weight.unflatten(0, (expansion.heads, -1))
    return by_head[:, : expansion.plain].flatten(0, 1), by_head[:, expansion.plain :].flatten(0, 1)


def _operands(
    query: Tensor, query_rope: Tensor, rows: Tensor, halves: tuple[Tensor, Tensor], expansion: FromLatents
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return query, its rotary part, key, its rotary part and value, batch first."""
    latent, rotary = rows[..., : expansion.latent], rows[..., expansion.latent :].transpose(0, 1)
    key, value = (
        F.linear(latent.squeeze(2).transpose(0, 1), half).unflatten(-1, (expansion.heads, -1))
        for half in halves
    )
    return query.transpose(0, 1), query_rope.transpose(0, 1), key, rotary, value
