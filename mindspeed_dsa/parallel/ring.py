"""A ring of ranks: each sends to the next one and receives from the one before, beside other work."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.parallel import kept
from mindspeed_dsa.parallel.handles import Pending


def pass_on(tensor: Tensor, group: Any, tag: int = 0) -> Pending:
    """Start to send a tensor to the next rank and to receive the previous rank's, of the same size.

    Every rank of the group calls it in the same order.

    Args:
        tensor: contiguous; not to be changed before the wait: gloo reads it when the receiver is ready.
        group: process group of at least two ranks.
        tag: tells transfers apart that are under way together. With two ranks the next one is the previous
            one too, and gloo, unlike NCCL and HCCL, does not pair messages by their order alone.

    Returns:
        What the previous rank has sent, pending; it keeps ``tensor`` until then. ``kept.give_back`` takes it.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = kept.take(tensor)
    following, previous = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    # The receive first: gloo's sender waits to be told of it, and with two ranks the word would come behind
    # all that is sent the other way.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, received, previous, group, tag),
            dist.P2POp(dist.isend, tensor, following, group, tag),
        ]
    )
    return Pending(received, works, [tensor])
