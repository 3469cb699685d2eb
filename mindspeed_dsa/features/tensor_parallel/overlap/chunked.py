"""Matmul and collective in chunks: one chunk is communicated while another one is multiplied.

A row is one token of the flattened input, ``sequence * batch``. Under sequence parallelism each tensor
parallel rank holds ``rows`` of them, and the gathered tensor is ``[tp, rows, width]``. A chunk is the same
range of every rank's rows. Products are written directly to their position in the output, so no reordering is
needed. Gathered chunks are copied once inside torch, because with gloo and NCCL the list form of all-gather
receives into a separate buffer.

All ranks of ``group`` must call every function in the same order, with the same shapes and numbers of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.parallel.collectives import exchange, reduce_scatter_tensor
from mindspeed_dsa.parallel.names import named
from mindspeed_dsa.parallel.transfers import Pending, bounds

Allocate = Callable[[list[int]], Tensor]
"""Function that returns memory of a given shape."""
_ROWS, _SUM = "rows of a linear layer", "sum of a linear layer"
"""Names of the collectives in records and messages."""


class Gather:
    """All-gather of rows in chunks, started asynchronously at construction.

    Args:
        local: this rank's rows ``[rows, width]``, contiguous.
        group: tensor parallel group.
        chunks: number of collectives.
        allocate: function that returns ``[tp, rows, width]`` in the dtype of ``local``; default: new memory.
    """

    def __init__(self, local: Tensor, group: Any, chunks: int, allocate: Allocate | None = None) -> None:
        self.local, self.ranks, self.rank = local, group.size(), dist.get_rank(group)
        rows, width = local.shape
        self.whole = (allocate or local.new_empty)([self.ranks, rows, width])
        """``[tp, rows, width]``; other ranks' rows are valid after :meth:`arriving` has yielded them."""
        self._ranges = bounds(rows, chunks)
        if len(self._ranges) == 1:
            whole = self.whole.flatten(0, 1)
            with named(_ROWS):
                self._works = [dist.all_gather_into_tensor(whole, local, group=group, async_op=True)]
            return
        with named(_ROWS):
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
        """Wait for all chunks, and return ``[tp * rows, width]``."""
        for work in self._works:
            work.wait()
        return self.whole.flatten(0, 1)

    def arriving(self) -> Iterator[tuple[int, int, int, Tensor]]:
        """Yield ``rank, first, end, rows``: first this rank's rows, then each chunk's rows as they arrive."""
        yield self.rank, 0, self.local.size(0), self.local
        for (first, end), work in zip(self._ranges, self._works, strict=True):
            work.wait()
            for rank in range(self.ranks):
                if rank != self.rank:
                    yield rank, first, end, self.whole[rank, first:end]


__all__ = ["BESIDE_COLLECTIVES", "Gather", "gather_matmul", "matmul_reduce", "matmul_scatter"]

BESIDE_COLLECTIVES = True
"""Functions here may start while a collective of the group is in flight, because they are collectives too."""


def gather_matmul(
    local: Tensor, weight: Tensor, group: Any, chunks: int, allocate: Allocate | None = None
) -> tuple[Tensor, Tensor]:
    """Gather the rows of all ranks and multiply them by ``weight``.

    Args:
        local: this rank's rows ``[rows, k]``, contiguous.
        weight: ``[k, n]``, any strides.
        group: tensor parallel group.
        chunks: number of chunks; with 1 the gather finishes before the matmul.
        allocate: allocator for the gathered rows, see :class:`Gather`.

    Returns:
        Product ``[tp * rows, n]`` and gathered rows ``[tp * rows, k]``.
    """
    gather = Gather(local, group, chunks, allocate)
    if chunks == 1:
        whole = gather.wait()
        return torch.mm(whole, weight), whole
    product = local.new_empty(gather.ranks, local.size(0), weight.size(1))
    for rank, first, end, rows in gather.arriving():
        torch.mm(rows, weight, out=product[rank, first:end])
    return product.flatten(0, 1), gather.whole.flatten(0, 1)


def matmul_scatter(whole: Tensor, weight: Tensor, group: Any, chunks: int) -> Pending:
    """Multiply ``whole @ weight`` in chunks and start to reduce-scatter the rows of the product.

    Args:
        whole: ``[tp * rows, k]``, any row stride.
        weight: ``[k, n]``, any strides.
        group: tensor parallel group.
        chunks: number of chunks; with 1 the matmul finishes before the reduce-scatter.

    Returns:
        Pending result ``[rows, n]``.
    """
    ranks = group.size()
    rows = whole.size(0) // ranks
    # Few rows may make fewer ranges than `chunks`.
    if len(ranges := bounds(rows, chunks)) == 1:
        product = torch.mm(whole, weight)
        pending = Pending(whole.new_empty(rows, weight.size(1)), [], [product])
        with named(_SUM):
            pending.works.append(reduce_scatter_tensor(pending.result, product, group=group, async_op=True))
        return pending
    by_rank = whole.unflatten(0, (ranks, rows))  # [tp, rows, k]
    # On CPU the reduce-scatter is a sum of exchanged products.
    if whole.device.type == "cpu":
        return _matmul_exchange(by_rank, weight, group, ranges)
    pending = Pending(whole.new_empty(rows, weight.size(1)), [], [])
    for first, end in ranges:
        # One chunk of every rank's rows: its reduce-scatter runs while the next chunk is multiplied.
        product = whole.new_empty(ranks, end - first, weight.size(1))
        for rank in range(ranks):
            torch.mm(by_rank[rank, first:end], weight, out=product[rank])
        pending.inputs.append(product)
        with named(_SUM):
            pending.works.append(
                dist.reduce_scatter_tensor(
                    pending.result[first:end], product.flatten(0, 1), group=group, async_op=True
                )
            )
    return pending


def _matmul_exchange(by_rank: Tensor, weight: Tensor, group: Any, ranges: list[tuple[int, int]]) -> Pending:
    """Multiply, and send each product to the rank that needs it; this rank's own rows come last."""
    ranks, rows, _ = by_rank.shape
    mine = dist.get_rank(group)
    others = [rank for rank in range(ranks) if rank != mine]
    pending = Pending(by_rank.new_empty(rows, weight.size(1)), [], [])
    for first, end in ranges:
        product = by_rank.new_empty(ranks - 1, end - first, weight.size(1))
        # Products for other ranks first, so that their transfer overlaps with the rest.
        for place, rank in enumerate(others):
            torch.mm(by_rank[rank, first:end], weight, out=product[place])
        with named(_SUM):
            pending.works.append(exchange(pending.result[first:end], product, group))
    torch.mm(by_rank[mine], weight, out=pending.result)
    return pending


def matmul_reduce(rows: Tensor, weight: Tensor, group: Any, chunks: int) -> Pending:
    """Multiply ``rows @ weight`` in chunks and start to all-reduce the products.

    Args:
        rows: ``[rows, k]``, any row stride.
        weight: ``[k, n]``, any strides.
        group: tensor parallel group.
        chunks: number of chunks; with 1 the matmul finishes before the all-reduce.

    Returns:
        Pending result ``[rows, n]``.
    """
    pending = Pending(rows.new_empty(rows.size(0), weight.size(1)), [], [])
    for first, end in bounds(rows.size(0), chunks):
        product = pending.result[first:end]
        torch.mm(rows[first:end], weight, out=product)
        with named(_SUM):
            pending.works.append(dist.all_reduce(product, group=group, async_op=True))
    return pending
