"""Multi-head latent attention math on ``[tokens, ...]`` tensors, as pure functions for torch.compile.

The functions match Megatron's operations in order and precision. Each function covers the operations between
two collectives.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.megatron.inlinable import Linear, Norm


class Sizes(NamedTuple):
    """Head count and dimensions of a layer on one rank."""

    heads: int
    plain: int
    rotary: int
    value: int
    latent: int


class Down(NamedTuple):
    """Down-projections and norms; a projection is None if it has already been applied to the input."""

    query: Linear | None
    key: Linear | None
    query_norm: Norm | None
    key_norm: Norm


Latents = tuple[Tensor | None, Tensor, Tensor]
"""Query ``[tokens, q_lora_rank]``, key-value ``[tokens, kv_lora_rank]``, rotary key ``[tokens, rotary]``."""


def latents(query_rows: Tensor, key_rows: Tensor, down: Down, sizes: Sizes) -> Latents:
    """Return normed latents, and the rotary key before rotation.

    Args:
        query_rows: hidden states ``[tokens, hidden]``, or their down-projection for the query.
        key_rows: hidden states, or their down-projection for key and value.
        down: projections and norms; without a query norm there is no query latent.
        sizes: layer's sizes.
    """
    query = None
    if down.query_norm is not None:
        query = down.query_norm.of(query_rows if down.query is None else down.query.of(query_rows))
    projected = key_rows if down.key is None else down.key.of(key_rows)
    latent, rotary_key = projected.split([sizes.latent, sizes.rotary], dim=-1)
    return query, down.key_norm.of(latent), rotary_key


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to ``[tokens, heads, rotary]``, and reorder the rotated dimensions.

    The input has each pair at adjacent positions. The output has all first coordinates, then all second ones.

    Args:
        states: projected query or key.
        cos: cosines ``[tokens, rotary]``, in the states' dtype.
        sin: sines, with the shape and dtype of ``cos``.
    """
    first, second = states[..., 0::2], states[..., 1::2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    # Pairs (x0, x1), (x2, x3) become halves (x0, x2, x1, x3), as Megatron's MLA stores rotated dimensions.
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
    """Return query and key ``[tokens, heads, plain + rotary]`` and value ``[tokens, heads, value]`` by head.

    Args:
        query_rows: query latents, or their up-projection.
        key_rows: key-value latents, or their up-projection.
        rotary_key: rotary key before rotation, ``[tokens, rotary]``.
        query_up: query's up-projection; None if it is already applied.
        key_up: up-projection of key and value; None if it is already applied.
        cos: cosines of the tokens.
        sin: sines of the tokens.
        sizes: layer's sizes.
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
    """Return absorbed query ``[tokens, heads, latent + rotary]`` and key ``[tokens, 1, latent + rotary]``.

    Args:
        query_rows: query latents, or their up-projection.
        latent: normed key-value latents ``[tokens, latent]``.
        rotary_key: rotary key before rotation, ``[tokens, rotary]``.
        query_up: query's up-projection; None if it is already applied.
        up_key: key's up-projection weight ``[heads, plain, latent]``.
        cos: cosines of the tokens.
        sin: sines of the tokens.
        sizes: layer's sizes.
    """
    query = query_rows if query_up is None else query_up.of(query_rows)
    plain, rotary = query.unflatten(-1, (sizes.heads, -1)).split([sizes.plain, sizes.rotary], dim=-1)
    # q . (W c) = (q W) . c: the key's up-projection W is applied to the query instead of every latent c.
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
    """Compute :func:`latents` and :func:`by_head` from ``[tokens, hidden]``; return outputs and latents."""
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
    """Compute :func:`latents` and :func:`absorbed` from ``[tokens, hidden]``; return outputs and latents.

    ``key_norm`` is the norm that Megatron fuses into the key's up-projection layer. The absorbed form does
    not call this layer, so the norm is applied here.
    """
    query, latent, rotary_key = latents(rows, rows, down, sizes)
    source = rows if query is None else query
    key = key_norm.of(latent)
    return *absorbed(source, key, rotary_key, query_up, up_key, cos, sin, sizes), query, latent


def up_projected(attended: Tensor, up_value: Tensor) -> Tensor:
    """Project attention outputs over latents, ``[tokens, heads, latent]``, to ``[tokens, heads * value]``.

    ``up_value`` is the value's up-projection weight ``[heads, value, latent]``.
    """
    return torch.einsum("thc,hdc->thd", attended, up_value).flatten(1)
