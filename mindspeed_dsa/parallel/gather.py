"""Rows of all ranks, gathered in chunks that can be used as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

Allocate = Callable[[list[int]], Tensor]
"""Memory of a given shape."""


def bounds(rows: int, chunks: int) -> list[tuple[int, int]]:
    """Ranges of rows, in order, whose sizes differ by one at most; never an empty one.

    Args:
        rows: how many there are.
        chunks: how many ranges are wanted; fewer where there are fewer rows.
    """
    chunks = max(1, min(chunks, rows))
    edges = [rows * index // chunks for index in range(chunks + 1)]
    return [(edges[index], edges[index + 1]) for index in range(chunks)]


class Gather:
    """All ranks' rows on their way here, chunk by chunk.

    Args:
        local: ``[rows, width]``, this rank's rows, contiguous.
        group: tensor parallel group.
        chunks: number of collectives.
        allocate: gives ``[tp, rows, width]`` in the type of ``local`` to gather into; default: new memory.
    """

    def __init__(self, local: Tensor, group: Any, chunks: int, allocate: Allocate | None = None) -> None:
        self.local, self.ranks, self.rank = local, group.size(), dist.get_rank(group)
        rows, width = local.shape
        self.whole = (allocate or local.new_empty)([self.ranks, rows, width])
        """``[tp, rows, width]``; other ranks' rows are there once :meth:`arriving` has named them."""
        self._ranges = bounds(rows, chunks)
        if len(self._ranges) == 1:
            whole = self.whole.flatten(0, 1)
            self._works = [dist.all_gather_into_tensor(whole, local, group=group, async_op=True)]
            return
        self._works = [
            dist.all_gather(
                [self.whole[rank, first:end] for rank in range(self.ranks)],
                local[first:end],
                group=group,
                async_op=True,
            )
            for first, end in self._ranges
        ]

    def wait(self) -> Tensor:
        """``[tp * rows, width]``, complete."""
        for work in self._works:
            work.wait()
        return self.whole.flatten(0, 1)

    def arriving(self) -> Iterator[tuple[int, int, int, Tensor]]:
        """``rank, first, end, rows of it``: own rows at once, the others' as soon as they are here."""
        yield self.rank, 0, self.local.size(0), self.local
        for (first, end), work in zip(self._ranges, self._works, strict=True):
            work.wait()
            for rank in range(self.ranks):
                if rank != self.rank:
                    yield rank, first, end, self.whole[rank, first:end]
