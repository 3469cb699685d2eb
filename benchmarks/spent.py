"""Time that work takes: wall-clock time, and CPU time, which other load on the machine does not change."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Spent(NamedTuple):
    """Seconds.

    Attributes:
        wall: wall-clock time.
        cpu: CPU time of this process, and of child processes that it has waited for.
    """

    wall: float
    cpu: float


def spent(do: Callable[[], Any]) -> Spent:
    """Return the time that a call takes."""
    started, used = time.perf_counter(), _used()
    do()
    return Spent(time.perf_counter() - started, _used() - used)


def _used() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
