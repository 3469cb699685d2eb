"""Process groups that only their members make."""

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
    """Make a group of some ranks of a group; those ranks call, in the same order, and no others.

    Its ranks wait for each other as long as the parent's do.

    Args:
        parent: group that all of them are in, and that all ranks of the world have made.
        ranks: numbers in the world, of this rank and of others.
    """
    # torch names such a group by the number of groups that the calling rank is in already. Ranks of a
    # pipeline are in different numbers of Megatron's groups, and a group with two names is never complete.
    place = (parent.group_name, tuple(ranks))
    _made[place] += 1
    name = hashlib.sha1(repr((place, _made[place])).encode(), usedforsecurity=False).hexdigest()
    named_by_torch = distributed_c10d._hash_ranks_to_str.__name__
    with mock.patch.object(distributed_c10d, named_by_torch, return_value=name):
        group: ProcessGroup = dist.new_group(
            list(ranks), timeout=_timeout_of(parent), use_local_synchronization=True
        )
    return group


def _timeout_of(group: Any) -> timedelta | None:
    """Return the time-out that a group was made with; None where its backend does not say it."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None
