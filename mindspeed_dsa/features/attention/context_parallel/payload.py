"""Payload of a ring or an exchange: rows that travel, and the keys and values that are made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.ops.precision import wide


class Expansion(Protocol):
    """Maker of keys and values from a payload's rows, and of the rows' gradients from theirs."""

    def keys_and_values(self, rows: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return ``[keys, b, kv_heads, dim]`` and ``[keys, b, kv_heads, value_dim]``."""

    def gradients(
        self, rows: Tensor, weights: tuple[Tensor, ...], grad_key: Tensor, grad_value: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the gradients of the rows and of each weight."""


@dataclass(frozen=True)
class Payload:
    """Rows of a sequence that stand for their keys and values.

    Attributes:
        rows: ``[keys, b, ...]``.
        expansion: what keys and values are made with.
        weights: parameters that it reads, the same on every rank of a ring.
    """

    rows: Tensor
    expansion: Expansion
    weights: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> Payload:
        """Build of keys ``[keys, b, kv_heads, dim]`` and values ``[keys, b, kv_heads, value_dim]``."""
        return cls(torch.cat([key, value], dim=-1), SideBySide(key.size(-1)))

    def with_rows(self, rows: Tensor, *weights: Tensor) -> Payload:
        """Return the same of other rows, and of other weights if there are any."""
        return replace(self, rows=rows, weights=weights or self.weights)


@dataclass(frozen=True)
class SideBySide:
    """Keys and values side by side, ``[keys, b, kv_heads, dim + value_dim]``.

    Attributes:
        dim: of keys.
    """

    dim: int

    def keys_and_values(self, rows: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Do as :class:`Expansion` says."""
        return rows[..., : self.dim], rows[..., self.dim :]

    def gradients(
        self, rows: Tensor, weights: tuple[Tensor, ...], grad_key: Tensor, grad_value: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Do as :class:`Expansion` says."""
        return torch.cat([grad_key, grad_value], dim=-1), ()


@dataclass(frozen=True)
class FromLatents:
    """Latent attention's keys and values: ``[keys, b, 1, latent + rope]``, and the up-projection's weight.

    The weight is ``[heads * (plain + value_dim), latent]``, by head, a key's part first. The rotary part of
    the key is one for all heads, rotated already.

    Attributes:
        heads: that the weight holds.
        latent: width of the latent part.
        plain: key dimensions without position.
    """

    heads: int
    latent: int
    plain: int

    def keys_and_values(self, rows: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Do as :class:`Expansion` says."""
        (weight,) = weights
        latent, rotary = rows[..., : self.latent], rows[..., self.latent :]
        # [keys, b, heads, plain + value_dim]
        up = F.linear(latent.squeeze(2), weight).unflatten(-1, (self.heads, -1))
        key = torch.cat([up[..., : self.plain], rotary.expand(-1, -1, self.heads, -1)], dim=-1)
        return key, up[..., self.plain :]

    def gradients(
        self, rows: Tensor, weights: tuple[Tensor, ...], grad_key: Tensor, grad_value: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Do as :class:`Expansion` says."""
        (weight,) = weights
        of_up = torch.cat([grad_key[..., : self.plain], grad_value], dim=-1)
        flat = of_up.to(weight.dtype).flatten(0, 1).flatten(1)  # [keys * b, heads * (plain + value_dim)]
        latent = rows[..., : self.latent].flatten(0, 2)
        of_latent = torch.mm(flat, weight).view(*rows.shape[:3], self.latent)
        of_rotary = grad_key[..., self.plain :].sum(dim=2, keepdim=True, dtype=wide(rows.dtype))
        return torch.cat([of_latent.to(of_rotary.dtype), of_rotary], dim=-1), (torch.mm(flat.t(), latent),)

    def of_heads(self, weight: Tensor, part: int, parts: int) -> tuple[FromLatents, Tensor]:
        """Return the same for one of equal parts of the heads, and the weight's part."""
        weights = weight.unflatten(0, (parts, -1))
        return replace(self, heads=self.heads // parts), weights[part]
