"""Contexts of implementations that tests call without a session, and states of the running session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from mindspeed_dsa import log, session
from mindspeed_dsa.feature import Context, Megatron


def context(feature: str, options: Any = None, root: str = "megatron") -> Context[Any]:
    """Build a context like a session's."""
    return Context(feature, options, Megatron(root), log.get(feature, root))


def running(feature: str) -> Context[Any] | None:
    """Return the context of a feature in the running session; ``None`` if it is off."""
    current = session.current()
    return current.contexts.get(feature) if current is not None else None


@contextmanager
def earlier_world() -> Iterator[bool]:
    """Let rank 0 run the block in a world of its own, as before an in-process restart that adds ranks.

    Yields whether this rank is in that world.
    """
    alone, everyone = dist.new_group([0]), dist.group.WORLD
    is_in_it = dist.get_rank() == 0
    if is_in_it:
        dist.GroupMember.WORLD = alone
    try:
        yield is_in_it
    finally:
        dist.GroupMember.WORLD = everyone
