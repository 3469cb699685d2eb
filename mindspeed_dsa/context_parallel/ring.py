"""Ring attention over zigzag rows: keys and values travel, each block behind attention to the one before.

With ``R`` ranks, rank ``a`` holds chunks ``a`` and ``2R - 1 - a`` of ``2R``. Of a block that an older rank
``j < a`` holds, all rows see the first half and none sees the second; of a younger rank's block, the second
half of the rows sees all and the first sees nothing. Every step is half of a block times a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.carried import Carried
from mindspeed_dsa.context_parallel.dense import (
    ALL,
    WHOLE,
    DenseAttention,
    Merged,
    Part,
    Saved,
    zeros_for_sums,
)
from mindspeed_dsa.context_parallel.strategy import ContextParallelStrategy, Exchanged, Inner
from mindspeed_dsa.parallel.ring import pass_on

_KEYS, _GRADIENTS = 1, 2
"""Tags: with two ranks both go to the same one."""


class CarryingStrategy(ContextParallelStrategy):
    """A strategy that attends in steps of its own, to keys and values that are made where they are needed."""

    def exchange(self, query: Tensor, key: Tensor, value: Tensor) -> Exchanged:
        """Raises: keys come in several steps; :meth:`attend` does them all."""
        raise NotImplementedError(f"{type(self).__name__} attends in steps; call attend")

    def attend(self, inner: Inner, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See :meth:`ContextParallelStrategy.attend`; ``inner`` is a :class:`DenseAttention`."""
        if not isinstance(inner, DenseAttention):
            raise TypeError(f"{type(self).__name__} merges parts of dense attention and cannot use {inner!r}")
        return self.attend_carried(inner, query, Carried.of(key, value))

    def attend_carried(self, inner: DenseAttention, query: Tensor, carried: Carried) -> Tensor:
        """Causal attention of this rank's rows to the whole sequence.

        Args:
            inner: attention to a part of the keys.
            query: ``[rows, b, heads, dim]``, this rank's rows.
            carried: this rank's keys and values.

        Returns:
            ``[rows, b, heads, value_dim]``.
        """
        raise NotImplementedError


class Ring(CarryingStrategy):
    """``megatron_cp_algo``: keys and values go around; queries stay."""

    def attend_carried(self, inner: DenseAttention, query: Tensor, carried: Carried) -> Tensor:
        """See :meth:`CarryingStrategy.attend_carried`."""
        return ring_attention(inner, query, carried, self.group)


def ring_attention(
    inner: DenseAttention, query: Tensor, carried: Carried, group: ProcessGroup | None
) -> Tensor:
    """Causal attention of zigzag rows to those of all ranks; gradients of keys go around as well, in fp32.

    Nothing of other ranks is kept for backward, in which keys and values travel again.

    Args:
        inner: attention to a part of the keys.
        query: ``[rows, b, heads, dim]``.
        carried: the same rows' keys and values.
        group: of the ring; ``None`` or one rank: the rows are the whole sequence.

    Returns:
        ``[rows, b, heads, value_dim]``.

    Raises:
        ValueError: an odd number of rows on several ranks.
    """
    rows, ranks = query.size(0), 1 if group is None else group.size()
    if ranks > 1 and rows % 2:
        raise ValueError(
            f"ring attention over {ranks} ranks takes two chunks of the sequence from each, and {rows} rows "
            f"are not two; use a sequence length divisible by {2 * ranks}"
        )
    out: Tensor = _Ring.apply(query, carried.rows.contiguous(), inner, carried, group, *carried.weights)
    return out


def _parts_of_step(step: int, rank: int, ranks: int, rows: int) -> list[Part]:
    """What this rank computes with the block that arrives in a step; 0 is its own."""
    if step == 0:
        return [WHOLE]
    half = rows // 2
    if step <= rank:
        return [Part(ALL, slice(0, half), causal=False)]
    return [Part(slice(half, None), ALL, causal=False)]


def _parts_of_own(rows: int) -> tuple[list[Part], list[Part]]:
    """The own block in two halves of equal work: one hides the first transfer of backward, one the last."""
    half = rows // 2
    front, back = slice(0, half), slice(half, None)
    return [Part(front, front, True), Part(back, back, True)], [Part(back, front, False)]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        rows: Tensor,
        inner: DenseAttention,
        carried: Carried,
        group: ProcessGroup | None,
        *weights: Tensor,
    ) -> Tensor:
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        expansion, merged, block = carried.expansion, Merged(), rows
        for step in range(ranks):
            coming = pass_on(block, group, _KEYS) if step < ranks - 1 else None
            for part in _parts_of_step(step, rank, ranks, query.size(0)):
                inner.forward(merged, query, *expansion.keys_and_values(block[part.keys], weights), part)
            if coming is not None:
                block = coming.wait()
        out, lse = merged.finish(query.dtype)
        ctx.save_for_backward(query, rows, out, lse, *weights)
        ctx.inner, ctx.expansion, ctx.group = inner, expansion, group
        return out.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, rows, out, lse, *weights = ctx.saved_tensors
        group = ctx.group
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        back = _Backward(ctx.inner, ctx.expansion, Saved(grad_out, query, out, lse), tuple(weights))
        length, own = query.size(0), zeros_for_sums(rows)
        if ranks == 1:
            back.add([WHOLE], rows, own)
            return back.grad_query.to(query.dtype), own.to(rows.dtype), None, None, None, *back.of_weights()
        first, last = _parts_of_own(length)
        # A block's gradient goes around behind it and comes home last. Each step's part of it is computed
        # while what other ranks have added so far is on its way.
        coming, arriving = pass_on(rows, group, _KEYS), None
        back.add(first, rows, own)
        for step in range(1, ranks):
            block = coming.wait()
            if step < ranks - 1:
                coming = pass_on(block, group, _KEYS)
            gradient = zeros_for_sums(block)
            back.add(_parts_of_step(step, rank, ranks, length), block, gradient)
            if arriving is not None:
                gradient.add_(arriving.wait())
            arriving = pass_on(gradient, group, _GRADIENTS)
        back.add(last, rows, own)
        assert arriving is not None
        own.add_(arriving.wait())
        return back.grad_query.to(query.dtype), own.to(rows.dtype), None, None, None, *back.of_weights()


class _Backward:
    """Gradients of one rank's backward; sums are in fp32 or wider."""

    def __init__(
        self, inner: DenseAttention, expansion: Any, saved: Saved, weights: tuple[Tensor, ...]
    ) -> None:
        self._inner, self._expansion, self._saved, self._weights = inner, expansion, saved, weights
        self.grad_query = zeros_for_sums(saved.query)
        self._grad_weights = [zeros_for_sums(weight) for weight in weights]

    def add(self, parts: list[Part], block: Tensor, gradient: Tensor) -> None:
        """Add the parts' gradients, those of the block's rows to ``gradient``."""
        for part in parts:
            rows = block[part.keys]
            key, value = self._expansion.keys_and_values(rows, self._weights)
            found = self._inner.backward(self._saved, key, value, part, self.grad_query)
            of_rows, of_weights = self._expansion.gradients(rows, self._weights, *found)
            gradient[part.keys].add_(of_rows)
            for total, one in zip(self._grad_weights, of_weights, strict=True):
                total.add_(one)

    def of_weights(self) -> list[Tensor]:
        """Gradients of the weights, in their dtypes."""
        return [one.to(weight.dtype) for one, weight in zip(self._grad_weights, self._weights, strict=True)]
