"""Dense causal attention on one rank, block by block, and payloads that expand to keys and values."""

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
    """Block of the attention matrix: a range of queries (``rows``) and keys, with a causal mask or none."""

    rows: slice
    keys: slice
    causal: bool


ALL = slice(None)
WHOLE = Part(ALL, ALL, causal=True)


class Merged:
    """Running output and log-sum-exp of the parts added so far, batch first, in fp32 or wider."""

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor, total: int) -> None:
        """Merge the attention output of one part into the running result, with a log-sum-exp rescale.

        Args:
            rows: range of the part's queries.
            out: attention to the part's keys only, ``[b, rows, heads, value_dim]``.
            lse: log-sum-exp of the part, ``[b, rows, heads]``.
            total: number of queries of all parts.
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
        """Return the final output and log-sum-exp: 0 and -inf for queries without any key.

        Args:
            query: query ``[rows, b, heads, dim]``; only its shape and dtype are used.
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
    """Dense attention on one rank, which context parallel strategies call for each part.

    Attributes:
        softmax_scale: factor of the attention scores.
        backend: name of the backend, see :data:`mindspeed_dsa.ops.backend.BackendName`.
    """

    softmax_scale: float
    backend: str = "auto"

    def __call__(self, exchanged: Exchanged) -> Tensor:
        """Compute attention after an exchange, differentiably.

        Returns:
            Attention output ``[rows, b, heads, value_dim]``.
        """
        parts = [WHOLE]
        if exchanged.positions is not None:
            parts = list(parts_of_positions(exchanged.positions))
        return _Parts.apply(exchanged.query, exchanged.key, exchanged.value, self, parts)  # type: ignore[no-any-return]

    def forward(self, merged: Merged, query: Tensor, key: Tensor, value: Tensor, part: Part) -> None:
        """Compute attention of one part and merge it into ``merged``.

        Args:
            merged: running result.
            query: all queries ``[rows, b, heads, dim]``; the part selects a range.
            key: ``[keys, b, kv_heads, dim]``, the part's keys only.
            value: ``[keys, b, kv_heads, value_dim]``, the part's values only.
            part: range of queries, and whether the mask is causal.
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
        """Compute one part's gradients; accumulate the query gradient into ``grad_query``.

        Args:
            saved: query, output gradient, final output and log-sum-exp, for all queries.
            key: ``[keys, b, kv_heads, dim]``, the part's keys only.
            value: ``[keys, b, kv_heads, value_dim]``, the part's values only.
            part: range of queries, and whether the mask is causal.
            grad_query: gradient buffer for all queries, ``[rows, b, heads, dim]``.

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
    """Tensors that backward needs, for all queries. Output and log-sum-exp are final, and batch first."""

    grad_out: Tensor
    query: Tensor
    out: Tensor
    lse: Tensor


def parts_of_positions(positions: Tensor) -> Iterator[Part]:
    """Yield the parts of causal attention for queries at given positions of a sequence.

    Args:
        positions: position of each query in the sequence, ``[rows]`` int64.
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
    """Return contiguous zeros shaped like ``states``, in fp32 or wider, to accumulate into."""
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
    """Function that expands a payload's rows to keys and values, and its backward."""

    def keys_and_values(self, rows: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Expand rows to keys ``[keys, b, kv_heads, dim]`` and values ``[keys, b, kv_heads, value_dim]``."""

    def gradients(
        self, rows: Tensor, weights: tuple[Tensor, ...], grad_key: Tensor, grad_value: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Backpropagate the key and value gradients to the rows and to each weight."""


@dataclass(frozen=True)
class Payload:
    """Tensor exchanged between ranks, and its expansion to keys and values (for example MLA latents).

    Attributes:
        rows: tensor to exchange, one row per key token, ``[keys, b, ...]``.
        expansion: expansion of the rows to keys and values.
        weights: parameters of the expansion, replicated on all ranks of a ring.
    """

    rows: Tensor
    expansion: Expansion
    weights: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> Payload:
        """Build from keys ``[keys, b, kv_heads, dim]`` and values ``[keys, b, kv_heads, value_dim]``."""
        return cls(torch.cat([key, value], dim=-1), SideBySide(key.size(-1)))

    def with_rows(self, rows: Tensor, *weights: Tensor) -> Payload:
        """Return a copy with other ``rows``, and other ``weights`` if any are given."""
        return replace(self, rows=rows, weights=weights or self.weights)


@dataclass(frozen=True)
class SideBySide:
    """Trivial expansion: keys and values concatenated, ``[keys, b, kv_heads, dim + value_dim]``.

    Attributes:
        dim: head dimension of keys.
    """

    dim: int

    def keys_and_values(self, rows: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Split each row into its key and its value."""
        return rows[..., : self.dim], rows[..., self.dim :]

    def gradients(
        self, rows: Tensor, weights: tuple[Tensor, ...], grad_key: Tensor, grad_value: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Concatenate the key and value gradients; there are no weights."""
        return torch.cat([grad_key, grad_value], dim=-1), ()


@dataclass(frozen=True)
class FromLatents:
    """Expansion of MLA latents ``[keys, b, 1, latent + rope]`` with the up-projection weight.

    The weight is ``[heads * (plain + value_dim), latent]``. For each head, the key's rows precede the
    value's. The rotary key dimensions are shared by all heads and already rotated.

    Attributes:
        heads: number of heads in the weight.
        latent: width of the latent, without the rotary dimensions.
        plain: key dimensions per head without the rotary dimensions.
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
        """Return the gradients of the latents and of the up-projection weight."""
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
        """Slice the expansion and its weight to the ``part``-th of ``parts`` equal groups of heads."""
        weights = weight.unflatten(0, (parts, -1))
        return replace(self, heads=self.heads // parts), weights[part]
