"""Latent attention's steps on rows ``[tokens, ...]``: what graphs are made of.

They are Megatron's own, in its order and precision; a graph contains those between two collectives.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.megatron.inlinable import Linear, Norm


class Sizes(NamedTuple):
    """Sizes of one rank's part of a layer."""

    heads: int
    plain: int
    rotary: int
    value: int
    latent: int


class Down(NamedTuple):
    """From hidden states to latents; a product is ``None`` where it was computed before."""

    query: Linear | None
    key: Linear | None
    query_norm: Norm | None
    key_norm: Norm


Latents = tuple[Tensor | None, Tensor, Tensor]
"""Query ``[tokens, q_lora_rank]``, key-value ``[tokens, kv_lora_rank]``, rotary key ``[tokens, rotary]``."""


def latents(query_rows: Tensor, key_rows: Tensor, down: Down, sizes: Sizes) -> Latents:
    """Normed latents, and the rotary key as it was projected.

    Args:
        query_rows: hidden states ``[tokens, hidden]``, or their product.
        key_rows: likewise.
        down: without a norm of the query there is no latent query.
        sizes: of the layer.
    """
    query = None
    if down.query_norm is not None:
        query = down.query_norm.of(query_rows if down.query is None else down.query.of(query_rows))
    projected = key_rows if down.key is None else down.key.of(key_rows)
    latent, rotary_key = projected.split([sizes.latent, sizes.rotary], dim=-1)
    return query, down.key_norm.of(latent), rotary_key


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``[tokens, heads, rotary]`` whose pairs lie next to each other, halves afterwards.

    Args:
        states: as they were projected.
        cos: ``[tokens, rotary]``, in the states' dtype.
        sin: likewise.
    """
    first, second = states[..., 0::2], states[..., 1::2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    halves, turned = torch.cat([first, second], dim=-1), torch.cat([-second, first], dim=-1)
    return halves * cos + turned * sin


def by_head(
    query_rows: Tensor,
    key_rows: Tensor,
    rotary_key: Tensor,
    query_up: Linear | None,
    key_up: Linear | None,
    cos: Tensor,
    sin: Tensor,
    sizes: Sizes,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key ``[tokens, heads, plain + rotary]``, and value ``[tokens, heads, value]``, of every head.

    Args:
        query_rows: latents, or their product.
        key_rows: likewise.
        rotary_key: ``[tokens, rotary]``.
        query_up: ``None`` where the product was computed before.
        key_up: likewise.
        cos: of the rows.
        sin: likewise.
        sizes: of the layer.
    """
    query = query_rows if query_up is None else query_up.of(query_rows)
    plain, rotary = query.unflatten(-1, (sizes.heads, -1)).split([sizes.plain, sizes.rotary], dim=-1)
    pair = key_rows if key_up is None else key_up.of(key_rows)
    plain_key, value = pair.unflatten(-1, (sizes.heads, -1)).split([sizes.plain, sizes.value], dim=-1)
    shared = rotated(rotary_key.unsqueeze(1), cos, sin).expand(-1, sizes.heads, -1)
    query = torch.cat([plain, rotated(rotary, cos, sin)], dim=-1)
    return query, torch.cat([plain_key, shared], dim=-1), value.contiguous()


def absorbed(
    query_rows: Tensor,
    latent: Tensor,
    rotary_key: Tensor,
    query_up: Linear | None,
    up_key: Tensor,
    cos: Tensor,
    sin: Tensor,
    sizes: Sizes,
) -> tuple[Tensor, Tensor]:
    """Query ``[tokens, heads, latent + rotary]``, and the key of all heads, ``[tokens, 1, latent + rotary]``.

    Args:
        query_rows: latents, or their product.
        latent: ``[tokens, latent]``.
        rotary_key: ``[tokens, rotary]``.
        query_up: ``None`` where the product was computed before.
        up_key: ``[heads, plain, latent]``.
        cos: of the rows.
        sin: likewise.
        sizes: of the layer.
    """
    query = query_rows if query_up is None else query_up.of(query_rows)
    plain, rotary = query.unflatten(-1, (sizes.heads, -1)).split([sizes.plain, sizes.rotary], dim=-1)
    query = torch.cat([torch.einsum("thd,hdc->thc", plain, up_key), rotated(rotary, cos, sin)], dim=-1)
    return query, torch.cat([latent.unsqueeze(1), rotated(rotary_key.unsqueeze(1), cos, sin)], dim=-1)


def whole_by_head(
    rows: Tensor,
    down: Down,
    query_up: Linear,
    key_up: Linear,
    cos: Tensor,
    sin: Tensor,
    sizes: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return :func:`by_head` of hidden states ``[tokens, hidden]``, then the two latents."""
    query, latent, rotary_key = latents(rows, rows, down, sizes)
    source = rows if query is None else query
    return *by_head(source, latent, rotary_key, query_up, key_up, cos, sin, sizes), query, latent


def whole_absorbed(
    rows: Tensor,
    down: Down,
    query_up: Linear,
    key_norm: Norm,
    up_key: Tensor,
    cos: Tensor,
    sin: Tensor,
    sizes: Sizes,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return :func:`absorbed` of hidden states ``[tokens, hidden]``, then the two latents.

    ``key_norm`` is the norm that the key's up-projection holds, which is not called in this form.
    """
    query, latent, rotary_key = latents(rows, rows, down, sizes)
    source = rows if query is None else query
    key = key_norm.of(latent)
    return *absorbed(source, key, rotary_key, query_up, up_key, cos, sin, sizes), query, latent


def up_projected(attended: Tensor, up_value: Tensor) -> Tensor:
    """Attention over latents, ``[tokens, heads, latent]``, to ``[tokens, heads * value]``.

    ``up_value`` is ``[heads, value, latent]``.
    """
    return torch.einsum("thc,hdc->thd", attended, up_value).flatten(1)
