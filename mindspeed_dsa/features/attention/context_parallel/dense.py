"""Dense causal attention on one rank, from parts of its rows and keys; and rows that keys are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.context_parallel.strategy import Exchanged
from mindspeed_dsa.ops.dense_attention import dense_attention, dense_attention_backward
from mindspeed_dsa.ops.precision import wide


class Part(NamedTuple):
    """Rows that attend to keys: all of them to all, or, if causal, each to those up to its own."""

    rows: slice
    keys: slice
    causal: bool


ALL = slice(None)
WHOLE = Part(ALL, ALL, causal=True)


class Merged:
    """Output and log-sum-exp of the parts added so far; sums are in fp32 or wider, batch first."""

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor, total: int) -> None:
        """Add a part.

        Args:
            rows: of the ``total`` rows.
            out: ``[b, rows, heads, value_dim]``, attention to the part's keys alone.
            lse: ``[b, rows, heads]``, likewise.
            total: number of rows of the whole.
        """
        if self._out is None or self._lse is None:
            if lse.size(1) == total:
                self._out, self._lse = out, lse
                return
            self._out = out.new_zeros((out.size(0), total, *out.shape[2:]), dtype=lse.dtype)
            self._lse = lse.new_full((lse.size(0), total, lse.size(2)), -torch.inf)
        elif self._out.dtype != lse.dtype:
            self._out = self._out.to(lse.dtype)
        before = self._lse[:, rows]
        both = torch.logaddexp(before, lse)
        merged = self._out[:, rows]
        merged.mul_((before - both).exp_()[..., None]).addcmul_((lse - both).exp_()[..., None], out)
        before.copy_(both)

    def finish(self, query: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp; zeros and -inf in rows that no part had.

        Args:
            query: ``[rows, b, heads, dim]``, whose dtype the output has.
            value_dim: of the output.
        """
        dtype = query.dtype
        if self._out is None or self._lse is None:
            shape = query.transpose(0, 1).shape[:3]
            return query.new_zeros(*shape, value_dim), query.new_full(shape, -torch.inf, dtype=wide(dtype))
        # Kernels pad heads: what is kept for backward is the output alone.
        return self._out.to(dtype).contiguous(), self._lse


@dataclass(frozen=True)
class DenseAttention:
    """Dense attention on one rank; what strategies get as their inner attention.

    Attributes:
        softmax_scale: factor of the scores.
        backend: see :data:`mindspeed_dsa.ops.backend.BackendName`.
    """

    softmax_scale: float
    backend: str = "auto"

    def __call__(self, exchanged: Exchanged) -> Tensor:
        """Attend; ``[rows, b, heads, value_dim]``, differentiable."""
        parts = [WHOLE]
        if exchanged.positions is not None:
            parts = list(parts_of_positions(exchanged.positions))
        return _Parts.apply(exchanged.query, exchanged.key, exchanged.value, self, parts)  # type: ignore[no-any-return]

    def forward(self, merged: Merged, query: Tensor, key: Tensor, value: Tensor, part: Part) -> None:
        """Add the attention of a part's rows to these keys.

        Args:
            merged: to what.
            query: ``[rows, b, heads, dim]``, all rows.
            key: ``[keys, b, kv_heads, dim]``, the part's keys only.
            value: ``[keys, b, kv_heads, value_dim]``, likewise.
            part: which rows; whether it is causal.
        """
        rows = query[part.rows].transpose(0, 1)
        out, lse = dense_attention(
            rows,
            key.transpose(0, 1),
            value.transpose(0, 1),
            self.softmax_scale,
            causal=part.causal,
            backend=self.backend,
        )
        merged.add(part.rows, out, lse, query.size(0))

    def backward(
        self, saved: Saved, key: Tensor, value: Tensor, part: Part, grad_query: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add to the gradient of the query what a part gives.

        Args:
            saved: of the whole.
            key: ``[keys, b, kv_heads, dim]``, the part's keys only.
            value: ``[keys, b, kv_heads, value_dim]``, likewise.
            part: which rows; whether it is causal.
            grad_query: ``[rows, b, heads, dim]``, all rows.

        Returns:
            Gradients of these keys and values.
        """
        gradients = dense_attention_backward(
            saved.grad_out[part.rows].transpose(0, 1),
            saved.query[part.rows].transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            saved.out[:, part.rows],
            saved.lse[:, part.rows],
            self.softmax_scale,
            causal=part.causal,
            backend=self.backend,
        )
        of_query, of_key, of_value = (one.transpose(0, 1) for one in gradients)
        grad_query[part.rows].add_(of_query)
        return of_key, of_value


class Saved(NamedTuple):
    """Tensors of all rows that backward reads; output and log-sum-exp are final and batch first."""

    grad_out: Tensor
    query: Tensor
    out: Tensor
    lse: Tensor


def parts_of_positions(positions: Tensor) -> Iterator[Part]:
    """Yield parts of rows that see the keys of a sequence, in its order, up to their own positions.

    Args:
        positions: ``[rows]`` int64.
    """
    known = positions.cpu()
    steps = (known[1:] != known[:-1] + 1).nonzero().flatten() + 1
    bounds = [0, *steps.tolist(), known.numel()]
    for first, end in pairwise(bounds):
        begin, rows = int(known[first]), slice(first, end)
        if begin:
            yield Part(rows, slice(0, begin), causal=False)
        yield Part(rows, slice(begin, begin + end - first), causal=True)


def zeros_for_sums(states: Tensor) -> Tensor:
    """Make zeros as large as ``states``, contiguous, fp32 or wider."""
    return torch.zeros(states.shape, dtype=wide(states.dtype), device=states.device)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, attention: DenseAttention, parts: Sequence[Part]
    ) -> Tensor:
        merged = Merged()
        for part in parts:
            attention.forward(merged, query, key[part.keys], value[part.keys], part)
        out, lse = merged.finish(query, value.size(-1))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.attention, ctx.parts = attention, parts
        return out.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        saved = Saved(grad_out, query, out, lse)
        gradients = tuple(zeros_for_sums(one) for one in (query, key, value))
        grad_query, grad_key, grad_value = gradients
        for part in ctx.parts:
            of_key, of_value = ctx.attention.backward(
                saved, key[part.keys], value[part.keys], part, grad_query
            )
            grad_key[part.keys].add_(of_key)
            grad_value[part.keys].add_(of_value)
        return *(one.to(query.dtype) for one in gradients), None, None


# -- keys and values that are made of rows which travel ---------------------------------------------------


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
