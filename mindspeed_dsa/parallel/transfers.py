"""Transfers that run beside other work: results under way, messages along a ring and between all pairs.

On every rank receives are posted before sends. gloo's sender waits to be told of the receive, and between two
ranks that word does not overtake what is sent the other way.
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
    """A result that collectives are still writing to.

    ``inputs`` are what they read. It may be waited for on another stream than it was started on: memory of
    the one does not go back to it before the other is that far.
    """

    result: Tensor
    works: list[Any]
    inputs: list[Tensor]
    stream: Any = field(init=False, default_factory=lambda: platforms.current().current_stream())

    def wait(self) -> Tensor:
        """Return the finished result, for work on the current stream from here on."""
        for work in self.works:
            work.wait()
        platform = platforms.current()
        stream = platform.current_stream()
        if stream != self.stream:
            for tensor in (self.result, *self.inputs):
                platform.record_stream(tensor, stream)
        self.works, self.inputs = [], []
        return self.result


def bounds(rows: int, chunks: int) -> list[tuple[int, int]]:
    """Return ranges of rows that are sent one by one: in order, as large but for one row, never an empty one.

    Args:
        rows: number of rows.
        chunks: number of ranges that are wanted; fewer where there are fewer rows.
    """
    chunks = max(1, min(chunks, rows))
    edges = [rows * index // chunks for index in range(chunks + 1)]
    return [(edges[index], edges[index + 1]) for index in range(chunks)]


def pass_on(tensor: Tensor, group: Any, tag: int = 0, what: str = "") -> Pending:
    """Start to send a tensor to the next rank and to receive the previous rank's, of the same size.

    Every rank of the group calls it in the same order.

    Args:
        tensor: contiguous; not to be changed before the wait: gloo reads it when the receiver is ready.
        group: process group of at least two ranks.
        tag: tells transfers apart that are under way together. With two ranks the next one is the previous
            one too, and gloo, unlike NCCL and HCCL, does not pair messages by their order alone.
        what: it is, in a few words.

    Returns:
        What the previous rank has sent, pending; it keeps ``tensor`` until then.
        :func:`buffer_pool.give_back` takes it.
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
"""How many each group has sent: several exchanges are under way at once, and gloo pairs messages by tag."""


def exchange_pairs(
    sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]], group: ProcessGroup
) -> list[Any]:
    """Start to exchange messages between all pairs of ranks, straight from and to the given tensors.

    gloo's all-gather into a list goes through a buffer of its own that is as large as all of it. On devices
    collectives are the better choice. Every rank of the group calls this in the same order.

    Args:
        sends: for each rank what it gets, contiguous; this one's own entry is not read. Not to be changed
            before the wait.
        receives: for each rank where what it sends is written to, contiguous, as many and as large.
        group: process group.

    Returns:
        What to wait for.
    """
    rank, ranks = group.rank(), group.size()
    first, most = _messages.get(group, 0), max(len(tensors) for tensors in sends)
    _messages[group] = first + most
    incoming = [(dist.irecv, (rank - step) % ranks, receives) for step in range(1, ranks)]
    outgoing = [(dist.isend, (rank + step) % ranks, sends) for step in range(1, ranks)]
    operations = []
    for function, peer, tensors in (*incoming, *outgoing):
        for number, tensor in enumerate(tensors[peer]):
            tag = _FIRST_TAG + (first + number) % _TAGS
            operations.append(dist.P2POp(function, tensor, dist.get_global_rank(group, peer), group, tag))
    works: list[Any] = dist.batch_isend_irecv(operations)
    return works
