"""Ring attention: keys and values travel, each block behind attention to the one before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.layout import Layout, rows_of_all
from mindspeed_dsa.context_parallel.packs import Pack
from mindspeed_dsa.context_parallel.strategy import ContextParallelStrategy, Exchanged, Inner
from mindspeed_dsa.features.attention.context_parallel.dense import (
    ALL,
    WHOLE,
    DenseAttention,
    Merged,
    Part,
    Payload,
    Saved,
    zeros_for_sums,
)
from mindspeed_dsa.parallel import buffer_pool
from mindspeed_dsa.parallel.transfers import Pending, pass_on

# -- the plan: which rows each rank attends with the block of keys that arrives in each step


class RingPlan(Protocol):
    """Work of one rank, by the rank whose block it is done with."""

    def own(self) -> list[Part]:
        """Return the work with this rank's own block."""

    def own_in_halves(self) -> tuple[list[Part], list[Part]]:
        """Return the same as two parts of about equal work."""

    def with_block_of(self, other: int) -> list[Part]:
        """Return the work with another rank's block, whose rows :class:`Part` counts from its first."""


@dataclass(frozen=True)
class ZigzagPlan:
    """Chunks ``rank`` and ``2R - 1 - rank`` of ``2R`` of a sequence.

    Of a block that an older rank ``j < rank`` holds, all rows see the first half and none sees the second; of
    a younger rank's block, the second half of the rows sees all and the first sees nothing.

    Attributes:
        rank: in the ring.
        rows: of each rank.
    """

    rank: int
    rows: int

    def own(self) -> list[Part]:
        """Do as :class:`RingPlan` says."""
        return [WHOLE]

    def own_in_halves(self) -> tuple[list[Part], list[Part]]:
        """Do as :class:`RingPlan` says."""
        return _in_halves(0, self.rows)

    def with_block_of(self, other: int) -> list[Part]:
        """Do as :class:`RingPlan` says."""
        half = self.rows // 2
        if other < self.rank:
            return [Part(ALL, slice(0, half), causal=False)]
        return [Part(slice(half, None), ALL, causal=False)]


@dataclass(frozen=True)
class LastRows(ZigzagPlan):
    """Rows of one rank, before whose own keys there are those of earlier rows.

    Attributes:
        earlier: how many.
    """

    earlier: int

    def own(self) -> list[Part]:
        """Do as :class:`RingPlan` says."""
        return [
            Part(ALL, slice(self.earlier), causal=False),
            Part(ALL, slice(self.earlier, None), causal=True),
        ]


@dataclass(frozen=True)
class PackPlan:
    """Any ascending rows of packed documents on each rank.

    Of its own block a row sees the rows of its document up to itself, of another block those of its document
    before it: the first few, because blocks are in the order of the pack.

    Attributes:
        pack: where documents lie.
        held: ``[ranks, rows]`` int64, of the pack.
        rank: in the ring.
    """

    pack: Pack
    held: Tensor
    rank: int

    def own(self) -> list[Part]:
        """Do as :class:`RingPlan` says."""
        return [Part(rows, rows, causal=True) for rows in self._documents(self.rank).values()]

    def own_in_halves(self) -> tuple[list[Part], list[Part]]:
        """Do as :class:`RingPlan` says."""
        first, last = [], []
        for rows in self._documents(self.rank).values():
            halves = _in_halves(rows.start, rows.stop)
            first += halves[0]
            last += halves[1]
        return first, last

    def with_block_of(self, other: int) -> list[Part]:
        """Do as :class:`RingPlan` says."""
        if other not in self._seen:
            self._seen[other] = list(self._parts_of(other))
        return self._seen[other]

    @cached_property
    def _seen(self) -> dict[int, list[Part]]:
        return {}

    def _parts_of(self, other: int) -> Iterator[Part]:
        theirs = self._documents(other)
        for document, rows in self._documents(self.rank).items():
            if document not in theirs:
                continue
            keys = theirs[document]
            seen = torch.searchsorted(self.held[other, keys], self.held[self.rank, rows])
            counts, lengths = torch.unique_consecutive(seen, return_counts=True)
            ends = (lengths.cumsum(0) + rows.start).tolist()
            for count, end, length in zip(counts.tolist(), ends, lengths.tolist(), strict=True):
                if count:
                    seen_keys = slice(keys.start, keys.start + count)
                    yield Part(slice(end - length, end), seen_keys, causal=False)

    def _documents(self, rank: int) -> dict[int, slice]:
        """Return where each document's rows lie on a rank, by its first row in the pack."""
        return self._by_rank[rank]

    @cached_property
    def _by_rank(self) -> list[dict[int, slice]]:
        return [_documents_among(self.pack, held) for held in self.held]


@lru_cache(maxsize=64)
def plan_of_pack(pack: Pack, layout: Layout, rank: int, neighbours: int = 1) -> PackPlan:
    """Plan a ring over ranks, or over groups of neighbours that hold their rows together, in order.

    Args:
        pack: where documents lie.
        layout: which rows each context parallel rank holds.
        rank: in the ring.
        neighbours: of a group.
    """
    held = rows_of_all(layout, pack.length).view(layout.ranks // neighbours, -1)
    return PackPlan(pack, held.sort(dim=1).values, rank)


def _documents_among(pack: Pack, rows: Tensor) -> dict[int, slice]:
    starts, sees = pack.starts[rows].long(), pack.ends[rows] > 0
    begins, counts = torch.unique_consecutive(torch.where(sees, starts, -1), return_counts=True)
    documents, row = {}, 0
    for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
        if begin >= 0:
            documents[begin] = slice(row, row + count)
        row += count
    return documents


def _in_halves(begin: int, end: int) -> tuple[list[Part], list[Part]]:
    """Halve causal rows and keys: each half by itself, and what the second sees of the first."""
    half = (begin + end) // 2
    front, back = slice(begin, half), slice(half, end)
    if begin == half:
        return [Part(back, back, causal=True)], []
    return [Part(front, front, causal=True), Part(back, back, causal=True)], [Part(back, front, causal=False)]


# -- the ring ------------------------------------------------------------------------------------

_KEYS, _GRADIENTS = 1, 2
"""Tags: with two ranks both go to the same one."""


class PackedRows(NamedTuple):
    """A pack of documents, and which of its rows each context parallel rank holds."""

    pack: Pack
    layout: Layout


class PayloadStrategy(ContextParallelStrategy):
    """Strategy that attends in steps of its own, to keys and values that are made of a payload."""

    def exchange(self, query: Tensor, key: Tensor, value: Tensor) -> Exchanged:
        """Raise ``NotImplementedError``: keys come in several steps, and :meth:`attend` does them all."""
        raise NotImplementedError(f"{type(self).__name__} attends in steps; call attend")

    def attend(self, inner: Inner, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend as :class:`ContextParallelStrategy` says; ``inner`` is a :class:`DenseAttention`."""
        if not isinstance(inner, DenseAttention):
            raise TypeError(f"{type(self).__name__} merges parts of dense attention and cannot use {inner!r}")
        return self.attend_payload(inner, query, Payload.of(key, value))

    def attend_payload(
        self, inner: DenseAttention, query: Tensor, payload: Payload, packed: PackedRows | None = None
    ) -> Tensor:
        """Attend causally, this rank's rows to the whole sequence, or to their documents.

        Args:
            inner: attention to a part of the keys.
            query: ``[rows, b, heads, dim]``, this rank's rows.
            payload: this rank's keys and values.
            packed: whose rows these are; default: those of one sequence in Megatron's zigzag.

        Returns:
            ``[rows, b, heads, value_dim]``.
        """
        raise NotImplementedError


class Ring(PayloadStrategy):
    """``megatron_cp_algo``: keys and values go around; queries stay."""

    def attend_payload(
        self, inner: DenseAttention, query: Tensor, payload: Payload, packed: PackedRows | None = None
    ) -> Tensor:
        """Attend as :class:`PayloadStrategy` says."""
        plan = None if packed is None else plan_of_pack(packed.pack, packed.layout, self.rank)
        return ring_attention(inner, query, payload, self.group, plan)


def ring_attention(
    inner: DenseAttention,
    query: Tensor,
    payload: Payload,
    group: ProcessGroup | None,
    plan: RingPlan | None = None,
) -> Tensor:
    """Attend causally, a rank's rows to those of all ranks; gradients of keys go around as well, in fp32.

    Nothing of other ranks is kept for backward, in which keys and values travel again.

    Args:
        inner: attention to a part of the keys.
        query: ``[rows, b, heads, dim]``.
        payload: the same rows' keys and values; on one rank, those of earlier rows before them.
        group: of the ring; ``None`` or one rank: the rows are all there are.
        plan: which rows see which keys; default: those of one sequence in a zigzag.

    Returns:
        ``[rows, b, heads, value_dim]``; zeros in rows that see no key.

    Raises:
        ValueError: an odd number of rows of a zigzag on several ranks.
    """
    rows, ranks = query.size(0), 1 if group is None else group.size()
    if plan is None:
        if ranks > 1 and rows % 2:
            raise ValueError(
                f"ring attention over {ranks} ranks takes two chunks of the sequence from each, and {rows} "
                f"rows are not two; use a sequence length divisible by {2 * ranks}"
            )
        plan = ZigzagPlan(0 if group is None else group.rank(), rows)
        if ranks == 1 and payload.rows.size(0) > rows:
            plan = LastRows(0, rows, payload.rows.size(0) - rows)
    out: Tensor = _Ring.apply(query, payload.rows.contiguous(), inner, payload, group, plan, *payload.weights)
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        rows: Tensor,
        inner: DenseAttention,
        payload: Payload,
        group: ProcessGroup | None,
        plan: RingPlan,
        *weights: Tensor,
    ) -> Tensor:
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        expansion, merged, block, parts = payload.expansion, Merged(), rows, plan.own()
        for step in range(1, ranks + 1):
            coming = pass_on(block, group, _KEYS, "keys of a ring step") if step < ranks else None
            for part in parts:
                inner.forward(merged, query, *expansion.keys_and_values(block[part.keys], weights), part)
            before = block
            if coming is not None:
                parts, block = plan.with_block_of((rank - step) % ranks), coming.wait()
            if before is not rows:
                buffer_pool.give_back(before)
        value_dim = expansion.keys_and_values(rows[:0], weights)[1].size(-1)
        out, lse = merged.finish(query, value_dim)
        ctx.save_for_backward(query, rows, out, lse, *weights)
        ctx.inner, ctx.expansion, ctx.group, ctx.plan = inner, expansion, group, plan
        return out.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, rows, out, lse, *weights = ctx.saved_tensors
        back = _Backward(ctx.inner, ctx.expansion, Saved(grad_out, query, out, lse), tuple(weights))
        if ctx.group is None or ctx.group.size() == 1:
            own = zeros_for_sums(rows)
            back.add(ctx.plan.own(), rows, own)
        else:
            own = _gradient_around(back, rows, ctx.group, ctx.plan)
        grad_query = back.grad_query.to(query.dtype)
        return grad_query, own.to(rows.dtype), None, None, None, None, *back.of_weights()


def _gradient_around(back: _Backward, rows: Tensor, group: ProcessGroup, plan: RingPlan) -> Tensor:
    """Return the gradient of a rank's own block, fp32 or wider.

    A block's gradient goes around behind it and comes home last. Each step's part of it is computed while
    what other ranks have added so far is on its way. One half of the own block hides the first transfer, and
    the other the last.
    """
    rank, ranks = group.rank(), group.size()
    own, (first, last) = zeros_for_sums(rows), plan.own_in_halves()
    block, coming = rows, pass_on(rows, group, _KEYS, "keys of a ring step")
    gradient: Tensor | None = None
    arriving: Pending | None = None
    back.add(first, rows, own)
    for step in range(1, ranks):
        before, block = block, coming.wait()
        if before is not rows:
            buffer_pool.give_back(before)
        if step < ranks - 1:
            coming = pass_on(block, group, _KEYS, "keys of a ring step")
        on_its_way, gradient = gradient, buffer_pool.take(block, own.dtype).zero_()
        back.add(plan.with_block_of((rank - step) % ranks), block, gradient)
        if arriving is not None and on_its_way is not None:
            received = arriving.wait()
            gradient.add_(received)
            buffer_pool.give_back(received, on_its_way)
        arriving = pass_on(gradient, group, _GRADIENTS, "gradient of keys of a ring step")
    back.add(last, rows, own)
    assert arriving is not None
    assert gradient is not None
    received = arriving.wait()
    own.add_(received)
    buffer_pool.give_back(received, gradient, block)
    return own


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
            gradients = self._inner.backward(self._saved, key, value, part, self.grad_query)
            of_rows, of_weights = self._expansion.gradients(rows, self._weights, *gradients)
            gradient[part.keys].add_(of_rows)
            for total, one in zip(self._grad_weights, of_weights, strict=True):
                total.add_(one)

    def of_weights(self) -> list[Tensor]:
        """Return the gradients of the weights, in their dtypes."""
        return [one.to(weight.dtype) for one, weight in zip(self._grad_weights, self._weights, strict=True)]
