"""Creation of process groups by their members only, unlike ``torch.distributed.new_group``."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

_made: Counter[tuple[str, tuple[int, ...]]] = Counter()


def subgroup(parent: ProcessGroup, ranks: Sequence[int]) -> ProcessGroup:
    """Create a subgroup with the parent's timeout. Only its ranks call this, all in the same order.

    Args:
        parent: process group that contains all of ``ranks``, created by all ranks of the world.
        ranks: global ranks of the members, including this rank.
    """
    # torch names the group by the number of groups that the calling rank is in. Ranks of a pipeline are in
    # different numbers of Megatron's groups, and a group that has two names never completes.
    place = (parent.group_name, tuple(ranks))
    # Counts groups of the same ranks, so that each gets a name of its own.
    _made[place] += 1
    name = hashlib.sha1(repr((place, _made[place])).encode(), usedforsecurity=False).hexdigest()
    named_by_torch = distributed_c10d._hash_ranks_to_str.__name__
    # With use_local_synchronization, new_group takes the name from this function.
    with mock.patch.object(distributed_c10d, named_by_torch, return_value=name):
        group: ProcessGroup = dist.new_group(
            list(ranks), timeout=_timeout_of(parent), use_local_synchronization=True
        )
    return group


def _timeout_of(group: Any) -> timedelta | None:
    """Return the timeout with which a group was created, or ``None`` if its backend does not expose it."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None
