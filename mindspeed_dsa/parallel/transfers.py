"""Asynchronous transfers: pending results, ring messages, and messages between all pairs of ranks.

Every rank posts its receives before its sends. A gloo sender waits until the receiver announces its receive,
and the announcement would queue behind data that the receiver sends to the same rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa import platforms
from mindspeed_dsa.parallel import buffer_pool
from mindspeed_dsa.parallel.names import named


@dataclass
class Pending:
    """Result of collectives that are still running.

    :meth:`wait` may run on another stream than the one on which the collectives were started. It then calls
    ``record_stream``, so that the memory is not reused too early.

    Attributes:
        result: buffer that the collectives write.
        works: handles of the collectives.
        inputs: tensors that the collectives read.
        stream: stream on which the collectives were started.
    """

    result: Tensor
    works: list[Any]
    inputs: list[Tensor]
    stream: Any = field(init=False, default_factory=lambda: platforms.current().current_stream())

    def wait(self) -> Tensor:
        """Make the current stream wait for the result and return it."""
        for work in self.works:
            work.wait()
        platform = platforms.current()
        stream = platform.current_stream()
        if stream != self.stream:
            for tensor in (self.result, *self.inputs):
                # The allocator must not reuse the memory before this stream is done with it.
                platform.record_stream(tensor, stream)
        self.works, self.inputs = [], []
        return self.result


def bounds(rows: int, chunks: int) -> list[tuple[int, int]]:
    """Split rows into contiguous ranges of nearly equal size, none of them empty.

    Args:
        rows: number of rows.
        chunks: number of ranges; fewer are returned if there are fewer rows.

    Returns:
        ``(start, stop)`` of each range, in order. Sizes differ by at most one row.
    """
    # 10 rows, 4 chunks: edges 0, 2, 5, 7, 10.
    chunks = max(1, min(chunks, rows))
    edges = [rows * index // chunks for index in range(chunks + 1)]
    return [(edges[index], edges[index + 1]) for index in range(chunks)]


def pass_on(tensor: Tensor, group: Any, tag: int = 0, what: str = "") -> Pending:
    """Start sending a tensor to the next rank and receiving one of the same size from the previous rank.

    Every rank of the group calls this in the same order.

    Args:
        tensor: contiguous tensor. It must not change before the wait: gloo reads it once the receiver is
            ready.
        group: process group of at least two ranks.
        tag: tag that separates concurrent transfers. Needed with two ranks, where the next and the previous
            rank are the same: gloo, unlike NCCL and HCCL, does not match messages by order.
        what: content of the message, for its name.

    Returns:
        Pending tensor from the previous rank. Its buffer comes from the pool: return it with
        :func:`buffer_pool.give_back`. ``tensor`` is kept alive until the wait.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = buffer_pool.take(tensor)
    following, previous = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    with named(what):
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, received, previous, group, tag),
                dist.P2POp(dist.isend, tensor, following, group, tag),
            ]
        )
    return Pending(received, works, [tensor])


_FIRST_TAG, _TAGS = 1 << 10, 1 << 20
_messages: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""Number of messages sent per group, used as tag, because gloo matches messages by tag."""


def exchange_pairs(
    sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]], group: ProcessGroup
) -> list[Any]:
    """Start sending a list of tensors to every other rank, and receiving lists, without extra copies.

    Every rank of the group calls this in the same order. Intended for gloo, whose all-gather into a list
    copies through an internal buffer of the total size. For device tensors use collectives instead.

    Args:
        sends: contiguous tensors for each rank; this rank's own entry is ignored. They must not change
            before the wait.
        receives: contiguous buffers for the tensors of each rank, the same numbers and sizes as sent.
        group: process group.

    Returns:
        Handles to wait for.
    """
    rank, ranks = group.rank(), group.size()
    first, most = _messages.get(group, 0), max(len(tensors) for tensors in sends)
    _messages[group] = first + most
    # Receives first, see above. In step s a rank receives from rank - s and sends to rank + s.
    incoming = [(dist.irecv, (rank - step) % ranks, receives) for step in range(1, ranks)]
    outgoing = [(dist.isend, (rank + step) % ranks, sends) for step in range(1, ranks)]
    operations = []
    for function, peer, tensors in (*incoming, *outgoing):
        for number, tensor in enumerate(tensors[peer]):
            # Tags from 1024 on, to keep clear of pass_on.
            tag = _FIRST_TAG + (first + number) % _TAGS
            operations.append(dist.P2POp(function, tensor, dist.get_global_rank(group, peer), group, tag))
    works: list[Any] = dist.batch_isend_irecv(operations)
    return works
