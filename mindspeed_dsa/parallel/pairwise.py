"""Messages between all pairs of ranks, straight from and to the tensors that are given.

gloo's all-gather into a list goes through a buffer of its own that is as large as all of it. On devices
collectives are the better choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_FIRST_TAG, _TAGS = 1 << 10, 1 << 20
_messages: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""How many each group has sent: several exchanges are under way at once, and gloo pairs messages by tag."""


def start(
    sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]], group: ProcessGroup
) -> list[Any]:
    """Start to exchange; every rank of the group calls it in the same order.

    Args:
        sends: for each rank what it gets, contiguous; this one's own entry is not read. Not to be changed
            before the wait.
        receives: for each rank where what it sends is written to, contiguous, as many and as large.
        group: process group.

    Returns:
        What to wait for.
    """
    rank, ranks = group.rank(), group.size()
    first, most = _messages.get(group, 0), max(len(each) for each in sends)
    _messages[group] = first + most
    incoming = [(dist.irecv, (rank - step) % ranks, receives) for step in range(1, ranks)]
    outgoing = [(dist.isend, (rank + step) % ranks, sends) for step in range(1, ranks)]
    operations = []
    # Receives first: gloo's sender waits to be told of them, and the word does not overtake what is sent.
    for function, peer, tensors in (*incoming, *outgoing):
        for number, tensor in enumerate(tensors[peer]):
            tag = _FIRST_TAG + (first + number) % _TAGS
            operations.append(dist.P2POp(function, tensor, dist.get_global_rank(group, peer), group, tag))
    works: list[Any] = dist.batch_isend_irecv(operations)
    return works
