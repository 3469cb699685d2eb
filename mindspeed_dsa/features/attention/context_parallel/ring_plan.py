"""Plan of a ring: which rows each rank attends with the block of keys that arrives in each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from mindspeed_dsa.context_parallel.layout import Layout, rows_of_all
from mindspeed_dsa.context_parallel.packs import Pack
from mindspeed_dsa.features.attention.context_parallel.dense import ALL, WHOLE, Part


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
