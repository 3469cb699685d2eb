"""Time that work takes: on the clock, and of processors, which other work on the machine does not change."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Spent(NamedTuple):
    """Seconds.

    Attributes:
        wall: on the clock.
        cpu: of processors, in this process and in those that it has forked and waited for.
    """

    wall: float
    cpu: float


def spent(do: Callable[[], Any]) -> Spent:
    """Return how long something takes."""
    started, used = time.perf_counter(), _used()
    do()
    return Spent(time.perf_counter() - started, _used() - used)


def _used() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
