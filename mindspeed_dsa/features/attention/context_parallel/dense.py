"""Dense causal attention on one rank in parts of rows and keys, and payloads that keys are expanded from."""

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
    """Part of attention: rows and keys, either all pairs or, if causal, keys up to each row's own."""

    rows: slice
    keys: slice
    causal: bool


ALL = slice(None)
WHOLE = Part(ALL, ALL, causal=True)


class Merged:
    """Merged output and log-sum-exp of the parts added so far, batch first, in fp32 or wider."""

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor, total: int) -> None:
        """Merge the attention to one part of the keys.

        Args:
            rows: range of the part's rows.
            out: attention to the part's keys only, ``[b, rows, heads, value_dim]``.
            lse: log-sum-exp of the part, ``[b, rows, heads]``.
            total: number of all rows.
        """
        if self._out is None or self._lse is None:
            # A first part with all rows needs no copy.
            if lse.size(1) == total:
                self._out, self._lse = out, lse
                return
            # [b, total, heads, value_dim]
            self._out = out.new_zeros((out.size(0), total, *out.shape[2:]), dtype=lse.dtype)
            self._lse = lse.new_full((lse.size(0), total, lse.size(2)), -torch.inf)
        elif self._out.dtype != lse.dtype:
            self._out = self._out.to(lse.dtype)
        # out = out * exp(lse_before - lse_both) + out_part * exp(lse_part - lse_both), in place through views
        before = self._lse[:, rows]
        both = torch.logaddexp(before, lse)
        merged = self._out[:, rows]
        merged.mul_((before - both).exp_()[..., None]).addcmul_((lse - both).exp_()[..., None], out)
        before.copy_(both)

    def finish(self, query: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp. Rows without any part are zeros and -inf.

        Args:
            query: ``[rows, b, heads, dim]``, for shape and dtype of the output.
            value_dim: head dimension of the output.
        """
        dtype = query.dtype
        if self._out is None or self._lse is None:
            shape = query.transpose(0, 1).shape[:3]  # [b, rows, heads]
            return query.new_zeros(*shape, value_dim), query.new_full(shape, -torch.inf, dtype=wide(dtype))
        # Kernels may return a slice of padded heads. contiguous() keeps only the output for backward.
        return self._out.to(dtype).contiguous(), self._lse


@dataclass(frozen=True)
class DenseAttention:
    """Dense attention on one rank, the inner attention of strategies.

    Attributes:
        softmax_scale: factor of the scores.
        backend: name of the backend, see :data:`mindspeed_dsa.ops.backend.BackendName`.
    """

    softmax_scale: float
    backend: str = "auto"

    def __call__(self, exchanged: Exchanged) -> Tensor:
        """Attend. Returns ``[rows, b, heads, value_dim]``, differentiable."""
        parts = [WHOLE]
        if exchanged.positions is not None:
            parts = list(parts_of_positions(exchanged.positions))
        return _Parts.apply(exchanged.query, exchanged.key, exchanged.value, self, parts)  # type: ignore[no-any-return]

    def forward(self, merged: Merged, query: Tensor, key: Tensor, value: Tensor, part: Part) -> None:
        """Merge attention of a part's rows to the part's keys.

        Args:
            merged: result to merge into.
            query: ``[rows, b, heads, dim]``, all rows.
            key: ``[keys, b, kv_heads, dim]``, the part's keys only.
            value: ``[keys, b, kv_heads, value_dim]``, the part's values only.
            part: rows of the part, and whether it is causal.
        """
        rows = query[part.rows].transpose(0, 1)  # [b, part's rows, heads, dim]
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
        """Add a part's share of the query gradient to ``grad_query``.

        Args:
            saved: tensors of all rows and parts.
            key: ``[keys, b, kv_heads, dim]``, the part's keys only.
            value: ``[keys, b, kv_heads, value_dim]``, the part's values only.
            part: rows of the part, and whether it is causal.
            grad_query: gradient buffer ``[rows, b, heads, dim]``, all rows.

        Returns:
            Gradients of the part's keys and values.
        """
        # The final lse of all parts gives this part's true probabilities, so gradients of parts just add up.
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
    """Tensors of all rows for backward. Output and log-sum-exp are final, and batch first."""

    grad_out: Tensor
    query: Tensor
    out: Tensor
    lse: Tensor


def parts_of_positions(positions: Tensor) -> Iterator[Part]:
    """Yield parts for rows that see all keys of a sequence up to their own position.

    Args:
        positions: position of each row in the sequence, ``[rows]`` int64.
    """
    positions_on_host = positions.cpu()
    steps = (positions_on_host[1:] != positions_on_host[:-1] + 1).nonzero().flatten() + 1
    bounds = [0, *steps.tolist(), positions_on_host.numel()]
    # Positions 0 1 6 7: rows 0:2 causal over keys 0:2; rows 2:4 over keys 0:6, and causal over 6:8.
    for first, end in pairwise(bounds):
        begin, rows = int(positions_on_host[first]), slice(first, end)
        if begin:
            yield Part(rows, slice(0, begin), causal=False)
        yield Part(rows, slice(begin, begin + end - first), causal=True)


def zeros_for_sums(states: Tensor) -> Tensor:
    """Return contiguous zeros in the shape of ``states``, fp32 or wider."""
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
        return out.transpose(0, 1)  # [rows, b, heads, value_dim]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        saved = Saved(grad_out, query, out, lse)
        # Parts add up in fp32 and are rounded once, at the end.
        gradients = tuple(zeros_for_sums(one) for one in (query, key, value))
        grad_query, grad_key, grad_value = gradients
        for part in ctx.parts:
            of_key, of_value = ctx.attention.backward(
                saved, key[part.keys], value[part.keys], part, grad_query
            )
            grad_key[part.keys].add_(of_key)
            grad_value[part.keys].add_(of_value)
        return *(one.to(query.dtype) for one in gradients), None, None


# -- keys and values that are expanded from exchanged rows -----------------------------------------------


class Expansion(Protocol):
    """Expansion of a payload's rows to keys and values, and its backward."""

    def keys_and_values(self, rows: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return ``[keys, b, kv_heads, dim]`` and ``[keys, b, kv_heads, value_dim]``."""

    def gradients(
        self, rows: Tensor, weights: tuple[Tensor, ...], grad_key: Tensor, grad_value: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the gradients of the rows and of each weight."""


@dataclass(frozen=True)
class Payload:
    """Rows of a sequence in place of its keys and values.

    Attributes:
        rows: tensor to exchange between ranks, ``[keys, b, ...]``.
        expansion: expansion of the rows to keys and values.
        weights: parameters of the expansion, equal on every rank of a ring.
    """

    rows: Tensor
    expansion: Expansion
    weights: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> Payload:
        """Build from keys ``[keys, b, kv_heads, dim]`` and values ``[keys, b, kv_heads, value_dim]``."""
        return cls(torch.cat([key, value], dim=-1), SideBySide(key.size(-1)))

    def with_rows(self, rows: Tensor, *weights: Tensor) -> Payload:
        """Return the payload with other rows, and other weights if given."""
        return replace(self, rows=rows, weights=weights or self.weights)


@dataclass(frozen=True)
class SideBySide:
    """Expansion of concatenated keys and values, ``[keys, b, kv_heads, dim + value_dim]``.

    Attributes:
        dim: head dimension of keys.
    """

    dim: int

    def keys_and_values(self, rows: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Split rows into keys and values."""
        return rows[..., : self.dim], rows[..., self.dim :]

    def gradients(
        self, rows: Tensor, weights: tuple[Tensor, ...], grad_key: Tensor, grad_value: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Concatenate the gradients. There are no weights."""
        return torch.cat([grad_key, grad_value], dim=-1), ()


@dataclass(frozen=True)
class FromLatents:
    """Expansion of latent attention's latents, ``[keys, b, 1, latent + rope]``, with the up-projection.

    The weight is ``[heads * (plain + value_dim), latent]``, head by head, key part first. The rotary part of
    the key is shared by all heads and already rotated.

    Attributes:
        heads: number of heads in the weight.
        latent: width of the latent part.
        plain: key dimensions per head without rotary part.
    """

    heads: int
    latent: int
    plain: int

    def keys_and_values(self, rows: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Project latents to keys and values of all heads."""
        (weight,) = weights
        latent, rotary = rows[..., : self.latent], rows[..., self.latent :]
        # [keys, b, heads, plain + value_dim]
        up = F.linear(latent.squeeze(2), weight).unflatten(-1, (self.heads, -1))
        # [keys, b, heads, plain + rope]
        key = torch.cat([up[..., : self.plain], rotary.expand(-1, -1, self.heads, -1)], dim=-1)
        return key, up[..., self.plain :]

    def gradients(
        self, rows: Tensor, weights: tuple[Tensor, ...], grad_key: Tensor, grad_value: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return gradients of latents and weight."""
        (weight,) = weights
        # [keys, b, heads, plain + value_dim]
        of_up = torch.cat([grad_key[..., : self.plain], grad_value], dim=-1)
        flat = of_up.to(weight.dtype).flatten(0, 1).flatten(1)  # [keys * b, heads * (plain + value_dim)]
        latent = rows[..., : self.latent].flatten(0, 2)  # [keys * b, latent]
        of_latent = torch.mm(flat, weight).view(*rows.shape[:3], self.latent)  # [keys, b, 1, latent]
        # [keys, b, 1, rope]: all heads share the rotary key, so their gradients are summed
        of_rotary = grad_key[..., self.plain :].sum(dim=2, keepdim=True, dtype=wide(rows.dtype))
        return torch.cat([of_latent.to(of_rotary.dtype), of_rotary], dim=-1), (torch.mm(flat.t(), latent),)

    def of_heads(self, weight: Tensor, part: int, parts: int) -> tuple[FromLatents, Tensor]:
        """Return the expansion and weight for one of ``parts`` equal parts of the heads."""
        weights = weight.unflatten(0, (parts, -1))
        return replace(self, heads=self.heads // parts), weights[part]
