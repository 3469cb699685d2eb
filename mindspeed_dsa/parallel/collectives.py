"""Collectives that gloo does with more traffic than they need.

``torch.distributed`` gives a reduce-scatter over gloo as an all-reduce of which each rank keeps its part:
twice the bytes, in two phases. Here the ranks exchange parts and each adds up its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_RESULTS = ("get_future", "get_future_result", "result")
"""Methods of a work that would give parts which are not added up."""


class Exchange:
    """Parts of a sum on their way here; ``wait`` adds them to what is in the output already.

    Args:
        output: ``[rows, ...]``, this rank's own part, or what becomes of it before :meth:`wait`.
        parts: for each other rank, in their order, ``[rows, ...]``; written to meanwhile.
        work: of the collective.
        kept: tensors that the collective reads.
    """

    def __init__(self, output: Tensor, parts: list[Tensor], work: Any, kept: Tensor) -> None:
        self._output, self._parts, self._work = output, parts, work
        self._kept: Tensor | None = kept

    def wait(self, *timeout: Any) -> bool:
        """Return when the output is the sum; later calls have nothing left to add."""
        self._work.wait(*timeout)
        for part in self._parts:
            self._output.add_(part)
        self._parts, self._kept = [], None
        return True

    def __getattr__(self, name: str) -> Any:
        """Return the collective's own attribute."""
        if name in _RESULTS:
            raise AttributeError(f"{name}: the sum is in the output once wait() has returned; call that")
        return getattr(self._work, name)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Do ``torch.distributed.reduce_scatter_tensor``, on CPU tensors without an all-reduce.

    Args:
        output: ``[rows, ...]``, contiguous.
        input: ``[ranks * rows, ...]``, of the output's dtype.
        op: sums are exchanged; everything else goes to ``torch.distributed``, also what it refuses.
        group: process group.
        async_op: return something to wait for.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if op != dist.ReduceOp.SUM or not _can_exchange(output, input, ranks):
        return dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)
    by_rank = input.contiguous().view(ranks, *output.shape)
    pending = exchange(output, _without(by_rank, rank), group)
    output.copy_(by_rank[rank])
    if async_op:
        return pending
    pending.wait()
    return None


def _without(by_rank: Tensor, rank: int) -> Tensor:
    """Return the parts of all ranks but one, contiguous; copied where that one lies in between."""
    if rank == 0:
        return by_rank[1:]
    if rank == by_rank.size(0) - 1:
        return by_rank[:-1]
    return torch.cat((by_rank[:rank], by_rank[rank + 1 :]))


def _can_exchange(output: Tensor, input: Tensor, ranks: int) -> bool:
    """Return whether both lie on the CPU and fit; asked before any rank starts to wait for this one."""
    return (
        input.device.type == output.device.type == "cpu"
        and input.dtype == output.dtype
        and input.numel() == ranks * output.numel()
        and output.is_contiguous()
    )


def exchange(output: Tensor, parts: Tensor, group: Any) -> Exchange:
    """Start a reduce-scatter whose own part comes later: it is to be in ``output`` before the wait.

    Args:
        output: ``[rows, ...]``.
        parts: ``[ranks - 1, rows, ...]``, contiguous: what the other ranks add, in their order.
        group: process group.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(parts)
    splits = [int(other != rank) for other in range(ranks)]
    work = dist.all_to_all_single(received, parts, splits, splits, group=group, async_op=True)
    return Exchange(output, list(received), work, parts)
