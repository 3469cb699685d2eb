"""MLA attention on NPUs whose operator takes the rotary dimensions of the query separately.

The query's rotary and non-rotary dimensions come from separate projections. Concatenating them would copy
both in forward and backward. Instead, the rotary query passes through Megatron's layer appended to the
latents.

Does not import Megatron, because it is loaded while Megatron is being imported.
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
    """Return the two tensors to pass through Megatron's layer as query and key.

    Args:
        plain: query without its rotary dimensions, ``[s, b, heads, plain]``.
        rotary: rotary dimensions of the query, ``[s, b, heads, rope]``.
        latents: latents and rotated key, ``[s, b, 1, latent + rope]``.

    Returns:
        ``plain``, and the latents with the rotary query appended, ``[s, b, 1, latent + rope + heads *
        rope]``.
    """
    # Contiguous here, so that Megatron's layer makes no copy: recomputation discards this tensor.
    return plain.contiguous(), torch.cat([latents, rotary.flatten(2).unsqueeze(2)], dim=-1)


def parts_of(config: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
    """Split a key made by :func:`beside_latents` into the latents and the rotary query (None if absent)."""
    width = config.kv_lora_rank + config.qk_pos_emb_head_dim
    if key.size(-1) == width:
        return key, None
    latents, rotary = key.split([width, key.size(-1) - width], dim=-1)  # rotary [s, b, 1, heads * rope]
    return latents, rotary.squeeze(2).unflatten(-1, (query.size(2), -1))  # [s, b, heads, rope]


def attend_in_parts(
    inner: DenseAttention,
    query: Tensor,
    query_rope: Tensor,
    rows: Tensor,
    expansion: FromLatents,
    weight: Tensor,
) -> Tensor:
    """Compute causal MLA attention on one rank, over one sequence of queries and latents.

    Args:
        inner: attention with the softmax scale and the backend.
        query: query without its rotary dimensions, ``[rows, b, heads, plain]``.
        query_rope: rotary dimensions of the query, ``[rows, b, heads, rope]``.
        rows: latents with the rotated key, ``[rows, b, 1, latent + rope]``.
        expansion: sizes of the keys and values expanded from the latents.
        weight: up-projection, ``[heads * (plain + value_dim), latent]``, head by head.

    Returns:
        Attention output ``[rows, b, heads, value_dim]``.
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
        return out.transpose(0, 1)  # [rows, b, heads, value_dim]

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
        latent = rows[..., : expansion.latent].transpose(0, 1).flatten(0, 2)  # [b * keys, latent]
        # [b, keys, heads, dim] -> [b * keys, heads * dim] each
        plain, value = (one.flatten(0, 1).flatten(1) for one in (of_plain, of_value))
        # [b, keys, 1, latent]
        of_latent = torch.addmm(torch.mm(plain, halves[0]), value, halves[1]).view(*of_rotary.shape[:3], -1)
        # [heads, plain or value_dim, latent] each
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
    """Split the up-projection into its key and value weights, ``[heads * dim, latent]`` each."""
    # These copies are small; slicing the projected keys and values would need copies of those.
    by_head = weight.unflatten(0, (expansion.heads, -1))
    return by_head[:, : expansion.plain].flatten(0, 1), by_head[:, expansion.plain :].flatten(0, 1)


def _operands(
    query: Tensor, query_rope: Tensor, rows: Tensor, halves: tuple[Tensor, Tensor], expansion: FromLatents
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return query, rotary query, key, rotary key and value, all batch first."""
    latent, rotary = rows[..., : expansion.latent], rows[..., expansion.latent :].transpose(0, 1)
    # [b, keys, heads, plain], [b, keys, heads, value_dim]
    key, value = (
        F.linear(latent.squeeze(2).transpose(0, 1), half).unflatten(-1, (expansion.heads, -1))
        for half in halves
    )
    return query.transpose(0, 1), query_rope.transpose(0, 1), key, rotary, value
