"""Times of work that the ranks of a group do together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_dsa import platforms


def timed(work: Callable[[], object], group: Any) -> float:
    """Seconds of one call on this rank; a collective call of all ranks of the group, which start together."""
    platform = platforms.current()
    dist.all_reduce(torch.zeros(1, device=platform.device), group=group)
    platform.synchronize()
    start = time.perf_counter()
    work()
    platform.synchronize()
    return time.perf_counter() - start
