"""Ring attention: each transfer of keys and values overlaps with attention to the previous block."""

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

# -- plans: the rows that attend to each rank's block of keys


class RingPlan(Protocol):
    """Parts of attention that one rank computes, for its own block of keys and for other ranks' blocks."""

    def own(self) -> list[Part]:
        """Return the parts for this rank's own block of keys."""

    def own_in_halves(self) -> tuple[list[Part], list[Part]]:
        """Return the parts of :meth:`own` in two lists of about equal work."""

    def with_block_of(self, other: int) -> list[Part]:
        """Return the parts for another rank's block. Their key ranges are relative to the block."""


@dataclass(frozen=True)
class ZigzagPlan:
    """Plan for a zigzag over ``R`` ranks: this rank has chunks ``rank`` and ``2R - 1 - rank`` of ``2R``.

    Causality decides which queries see another rank's block of keys. If the other rank is lower, all queries
    see the first half of its block, and none the second. If it is higher, the second half of the queries sees
    the whole block, and the first half sees nothing.

    Attributes:
        rank: rank in the ring.
        rows: number of tokens per rank.
    """

    rank: int
    rows: int

    def own(self) -> list[Part]:
        """Return one causal part for this rank's own block, whose tokens are in sequence order."""
        return [WHOLE]

    def own_in_halves(self) -> tuple[list[Part], list[Part]]:
        return _in_halves(0, self.rows)

    def with_block_of(self, other: int) -> list[Part]:
        """Return the parts for another rank's block; they need no mask."""
        # R = 4, rank 1 holds chunks 1 6. Rank 0 has 0 7: both see 0. Rank 2 has 2 5: only chunk 6 sees them.
        half = self.rows // 2
        if other < self.rank:
            return [Part(ALL, slice(0, half), causal=False)]
        return [Part(slice(half, None), ALL, causal=False)]


@dataclass(frozen=True)
class LastRows(ZigzagPlan):
    """Plan for a single rank whose keys start before its queries (the queries are the last tokens).

    Attributes:
        earlier: number of keys before the first query's key.
    """

    earlier: int

    def own(self) -> list[Part]:
        """Return two parts: earlier keys without a mask, and the queries' own keys with a causal mask."""
        return [
            Part(ALL, slice(self.earlier), causal=False),
            Part(ALL, slice(self.earlier, None), causal=True),
        ]


@dataclass(frozen=True)
class PackPlan:
    """Plan for packed documents, for any assignment of tokens to ranks, in ascending order on each rank.

    A query sees the earlier keys of its document, and its own key. In another rank's block these keys are a
    prefix of the document's range, because each block is in pack order.

    Attributes:
        pack: boundaries of the documents.
        held: pack positions of each rank's tokens, ``[ranks, rows]`` int64.
        rank: rank in the ring.
    """

    pack: Pack
    held: Tensor
    rank: int

    def own(self) -> list[Part]:
        """Return one causal part per document in this rank's own block."""
        return [Part(rows, rows, causal=True) for rows in self._documents(self.rank).values()]

    def own_in_halves(self) -> tuple[list[Part], list[Part]]:
        first, last = [], []
        for rows in self._documents(self.rank).values():
            halves = _in_halves(rows.start, rows.stop)
            first += halves[0]
            last += halves[1]
        return first, last

    def with_block_of(self, other: int) -> list[Part]:
        """Return the parts for another rank's block; cached per rank."""
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
            # Number of their keys before each of our rows. Runs of rows with equal counts become one part:
            # counts 2 2 5 -> rows 0:2 see 2 keys, row 2 sees 5.
            keys = theirs[document]
            seen = torch.searchsorted(self.held[other, keys], self.held[self.rank, rows])
            counts, lengths = torch.unique_consecutive(seen, return_counts=True)
            ends = (lengths.cumsum(0) + rows.start).tolist()
            for count, end, length in zip(counts.tolist(), ends, lengths.tolist(), strict=True):
                if count:
                    seen_keys = slice(keys.start, keys.start + count)
                    yield Part(slice(end - length, end), seen_keys, causal=False)

    def _documents(self, rank: int) -> dict[int, slice]:
        """Return a dict from a document's first pack position to the range of its tokens on a rank."""
        return self._by_rank[rank]

    @cached_property
    def _by_rank(self) -> list[dict[int, slice]]:
        return [_documents_among(self.pack, held) for held in self.held]


@lru_cache(maxsize=64)
def plan_of_pack(pack: Pack, layout: Layout, rank: int, neighbours: int = 1) -> PackPlan:
    """Build the plan of a ring over single ranks, or over groups of neighbours that exchange heads.

    Args:
        pack: boundaries of the documents.
        layout: assignment of tokens to context parallel ranks.
        rank: rank in the ring.
        neighbours: number of ranks per group; 1: single ranks.
    """
    held = rows_of_all(layout, pack.length).view(layout.ranks // neighbours, -1)
    return PackPlan(pack, held.sort(dim=1).values, rank)


def _documents_among(pack: Pack, rows: Tensor) -> dict[int, slice]:
    # Padding rows see nothing (end 0): mark them with start -1 and skip them.
    starts, sees = pack.starts[rows].long(), pack.ends[rows] > 0
    begins, counts = torch.unique_consecutive(torch.where(sees, starts, -1), return_counts=True)
    documents, row = {}, 0
    for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
        if begin >= 0:
            documents[begin] = slice(row, row + count)
        row += count
    return documents


def _in_halves(begin: int, end: int) -> tuple[list[Part], list[Part]]:
    """Split a causal triangle into its two diagonal sub-triangles, and the square below the diagonal."""
    half = (begin + end) // 2
    front, back = slice(begin, half), slice(half, end)
    if begin == half:
        return [Part(back, back, causal=True)], []
    return [Part(front, front, causal=True), Part(back, back, causal=True)], [Part(back, front, causal=False)]


# -- the ring ------------------------------------------------------------------------------------

_KEYS, _GRADIENTS = 1, 2
"""Message tags. With two ranks, keys and gradients go to the same rank."""


class PackedRows(NamedTuple):
    """Packed documents, and the layout of their tokens over context parallel ranks."""

    pack: Pack
    layout: Layout


class PayloadStrategy(ContextParallelStrategy):
    """Base of strategies that attend in several steps, with a payload in place of keys and values."""

    def exchange(self, query: Tensor, key: Tensor, value: Tensor) -> Exchanged:
        """Raise ``NotImplementedError``: keys arrive in several steps, so :meth:`attend` exchanges them."""
        raise NotImplementedError(f"{type(self).__name__} attends in steps; call attend")

    def attend(self, inner: Inner, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention; see :class:`ContextParallelStrategy`. ``inner``: a :class:`DenseAttention`."""
        if not isinstance(inner, DenseAttention):
            raise TypeError(f"{type(self).__name__} merges parts of dense attention and cannot use {inner!r}")
        return self.attend_payload(inner, query, Payload.of(key, value))

    def attend_payload(
        self, inner: DenseAttention, query: Tensor, payload: Payload, packed: PackedRows | None = None
    ) -> Tensor:
        """Compute causal attention from this rank's queries to the sequence, or within their documents.

        Args:
            inner: attention operator, called for one part at a time.
            query: this rank's queries, ``[rows, b, heads, dim]``.
            payload: this rank's keys and values.
            packed: packed documents of the tokens; None: one sequence in Megatron's zigzag.

        Returns:
            Attention output ``[rows, b, heads, value_dim]``.
        """
        raise NotImplementedError


class Ring(PayloadStrategy):
    """Strategy ``megatron_cp_algo``: keys and values are sent around a ring, queries stay on their rank."""

    def attend_payload(
        self, inner: DenseAttention, query: Tensor, payload: Payload, packed: PackedRows | None = None
    ) -> Tensor:
        """Run :func:`ring_attention`; see :meth:`PayloadStrategy.attend_payload`."""
        plan = None if packed is None else plan_of_pack(packed.pack, packed.layout, self.rank)
        return ring_attention(inner, query, payload, self.group, plan)


def ring_attention(
    inner: DenseAttention,
    query: Tensor,
    payload: Payload,
    group: ProcessGroup | None,
    plan: RingPlan | None = None,
) -> Tensor:
    """Compute causal attention from this rank's queries to the keys of all ranks in a ring.

    Received blocks are not saved for backward; keys and values are sent around the ring again. Their
    gradients are sent around in fp32.

    Args:
        inner: attention operator, called for one part at a time.
        query: ``[rows, b, heads, dim]``.
        payload: keys and values of the same tokens. On one rank, keys of earlier tokens can precede them.
        group: process group of the ring; None or one rank: no ring.
        plan: parts of attention to compute; None: one sequence in zigzag layout.

    Returns:
        Attention output ``[rows, b, heads, value_dim]``, zeros for queries without visible keys.

    Raises:
        ValueError: a rank has an odd number of tokens in a zigzag over several ranks.
    """
    rows, ranks = query.size(0), 1 if group is None else group.size()
    if plan is None:
        if ranks > 1 and rows % 2:
            raise ValueError(
                f"ring attention over {ranks} ranks takes two chunks of the sequence from each, and {rows} "
                f"rows are not two; use a sequence length divisible by {2 * ranks}"
            )
        plan = ZigzagPlan(0 if group is None else group.rank(), rows)
        # On one rank, more keys than queries: earlier tokens of the sequence come first.
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
        # Each step sends the current block on while attending to it. The block received in step k is from
        # rank - k.
        for step in range(1, ranks + 1):
            coming = pass_on(block, group, _KEYS, "keys of a ring step") if step < ranks else None
            for part in parts:
                inner.forward(merged, query, *expansion.keys_and_values(block[part.keys], weights), part)
            before = block
            if coming is not None:
                parts, block = plan.with_block_of((rank - step) % ranks), coming.wait()
            if before is not rows:
                buffer_pool.give_back(before)
        # Expanding zero rows gives the head dimension of values without work.
        value_dim = expansion.keys_and_values(rows[:0], weights)[1].size(-1)
        out, lse = merged.finish(query, value_dim)
        # Blocks of other ranks are not saved: backward sends them around again.
        ctx.save_for_backward(query, rows, out, lse, *weights)
        ctx.inner, ctx.expansion, ctx.group, ctx.plan = inner, expansion, group, plan
        return out.transpose(0, 1)  # [rows, b, heads, value_dim]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, rows, out, lse, *weights = ctx.saved_tensors
        back = _Backward(ctx.inner, ctx.expansion, Saved(grad_out, query, out, lse), tuple(weights))
        if ctx.group is None or ctx.group.size() == 1:
            gradient = zeros_for_sums(rows)
            back.add(ctx.plan.own(), rows, gradient)
        else:
            gradient = _gradient_around(back, rows, ctx.group, ctx.plan)
        grad_query = back.grad_query.to(query.dtype)
        return grad_query, gradient.to(rows.dtype), None, None, None, None, *back.of_weights()


def _gradient_around(back: _Backward, rows: Tensor, group: ProcessGroup, plan: RingPlan) -> Tensor:
    """Send keys and their gradients around the ring; return the gradient of this rank's own block."""
    # A block's gradient goes around one step after the block, and reaches its owner last. Each step computes
    # this rank's share while the sum of earlier ranks is in flight. One half of the own block hides the
    # first transfer, the other half the last.
    rank, ranks = group.rank(), group.size()
    own_gradient, (first, last) = zeros_for_sums(rows), plan.own_in_halves()
    # The own block leaves for the next rank, and the previous rank's block arrives.
    block, coming = rows, pass_on(rows, group, _KEYS, "keys of a ring step")
    gradient: Tensor | None = None
    arriving: Pending | None = None
    back.add(first, rows, own_gradient)
    for step in range(1, ranks):
        before, block = block, coming.wait()
        if before is not rows:
            buffer_pool.give_back(before)
        if step < ranks - 1:
            coming = pass_on(block, group, _KEYS, "keys of a ring step")
        # `gradient` of the last step is still being sent: take another buffer for this block's share.
        on_its_way, gradient = gradient, buffer_pool.take(block, own_gradient.dtype).zero_()
        back.add(plan.with_block_of((rank - step) % ranks), block, gradient)
        # The previous rank had this block one step earlier. Add its sum to this rank's share, and send the
        # result after the block.
        if arriving is not None and on_its_way is not None:
            received = arriving.wait()
            gradient.add_(received)
            buffer_pool.give_back(received, on_its_way)
        arriving = pass_on(gradient, group, _GRADIENTS, "gradient of keys of a ring step")
    # In the last step the gradient of the next rank's block was sent home, and the own block's arrives here.
    back.add(last, rows, own_gradient)
    assert arriving is not None
    assert gradient is not None
    received = arriving.wait()
    own_gradient.add_(received)
    buffer_pool.give_back(received, gradient, block)
    return own_gradient


class _Backward:
    """Accumulator of one rank's query and weight gradients, in fp32 or wider."""

    def __init__(
        self, inner: DenseAttention, expansion: Any, saved: Saved, weights: tuple[Tensor, ...]
    ) -> None:
        self._inner, self._expansion, self._saved, self._weights = inner, expansion, saved, weights
        self.grad_query = zeros_for_sums(saved.query)
        self._grad_weights = [zeros_for_sums(weight) for weight in weights]

    def add(self, parts: list[Part], block: Tensor, gradient: Tensor) -> None:
        """Accumulate the gradients of some parts; key gradients go to ``gradient``, shaped like ``block``."""
        for part in parts:
            rows = block[part.keys]
            # Expand again instead of saving keys of all heads.
            key, value = self._expansion.keys_and_values(rows, self._weights)
            gradients = self._inner.backward(self._saved, key, value, part, self.grad_query)
            of_rows, of_weights = self._expansion.gradients(rows, self._weights, *gradients)
            gradient[part.keys].add_(of_rows)
            for total, one in zip(self._grad_weights, of_weights, strict=True):
                total.add_(one)

    def of_weights(self) -> list[Tensor]:
        """Return the gradients of the weights, in the weights' dtypes."""
        return [one.to(weight.dtype) for one, weight in zip(self._grad_weights, self._weights, strict=True)]
