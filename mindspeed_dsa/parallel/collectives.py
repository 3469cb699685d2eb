"""Reduce-scatter over gloo that sends half as many bytes as an all-reduce.

``torch.distributed`` implements reduce-scatter over gloo as an all-reduce, of which each rank keeps its own
part. That sends twice the bytes, in two phases. Here each rank sends every other rank its part, and sums the
parts that it receives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_RESULTS = ("get_future", "get_future_result", "result")
"""Methods of a work handle that would return parts before they are summed."""


class Exchange:
    """Handle of a reduce-scatter; ``wait`` adds the received parts to the output.

    Args:
        output: this rank's part of the result, ``[rows, ...]``. The caller may write it until :meth:`wait`.
        parts: receive buffers ``[rows, ...]``, one per other rank, in rank order.
        work: handle of the collective.
        kept: tensor that the collective reads, kept alive until the collective is done.
    """

    def __init__(self, output: Tensor, parts: list[Tensor], work: Any, kept: Tensor) -> None:
        self._output, self._parts, self._work = output, parts, work
        self._kept: Tensor | None = kept

    def wait(self, *timeout: Any) -> bool:
        """Wait, and add the received parts to the output. Later calls add nothing."""
        self._work.wait(*timeout)
        for part in self._parts:
            self._output.add_(part)
        self._parts, self._kept = [], None
        return True

    def __getattr__(self, name: str) -> Any:
        """Forward all other attributes to the collective's handle."""
        if name in _RESULTS:
            raise AttributeError(f"{name}: the sum is in the output once wait() has returned; call that")
        return getattr(self._work, name)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Like ``torch.distributed.reduce_scatter_tensor``, but faster for sums of CPU tensors over gloo.

    Args:
        output: result, ``[rows, ...]``, contiguous.
        input: concatenated parts for all ranks, ``[ranks * rows, ...]``, with the output's dtype.
        op: reduction. Other reductions than sums, and invalid calls, are passed to ``torch.distributed``.
        group: process group.
        async_op: whether to return a handle with ``wait()`` instead of waiting.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if op != dist.ReduceOp.SUM or not _can_exchange(output, input, ranks):
        return dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)
    by_rank = input.contiguous().view(ranks, *output.shape)
    pending = exchange(output, _without(by_rank, rank), group)
    # The own part is copied while the exchange is in flight.
    output.copy_(by_rank[rank])
    if async_op:
        return pending
    pending.wait()
    return None


def _without(by_rank: Tensor, rank: int) -> Tensor:
    """Return the parts of all ranks except one, contiguous; a view if that rank is the first or the last."""
    if rank == 0:
        return by_rank[1:]
    if rank == by_rank.size(0) - 1:
        return by_rank[:-1]
    return torch.cat((by_rank[:rank], by_rank[rank + 1 :]))


def _can_exchange(output: Tensor, input: Tensor, ranks: int) -> bool:
    """Return whether both tensors are on the CPU with fitting shapes, before any communication."""
    return (
        input.device.type == output.device.type == "cpu"
        and input.dtype == output.dtype
        and input.numel() == ranks * output.numel()
        and output.is_contiguous()
    )


def exchange(output: Tensor, parts: Tensor, group: Any) -> Exchange:
    """Start a reduce-scatter whose own part the caller computes during the transfer.

    Args:
        output: this rank's own part, ``[rows, ...]``, which the caller writes before the wait.
        parts: parts for the other ranks in rank order, ``[ranks - 1, rows, ...]``, contiguous.
        group: process group.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(parts)
    # 3 ranks, rank 1: splits = [1, 0, 1].
    splits = [int(other != rank) for other in range(ranks)]
    work = dist.all_to_all_single(received, parts, splits, splits, group=group, async_op=True)
    return Exchange(output, list(received), work, parts)
