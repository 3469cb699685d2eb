"""Timing of alternatives that a feature chooses from, so that all ranks of a group make the same choice.

Imports torch only when something is measured, because the ``feature.py`` of every measuring feature imports
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from mindspeed_dsa import platforms
from mindspeed_dsa.megatron.configuration import argument

Key = TypeVar("Key")


def check_measured(args: Any, flag: str, measured: str, fix: str) -> Iterator[str]:
    """Yield a problem if a choice depends on timing although the job sets ``--deterministic-mode``.

    Every feature that measures with :func:`timed` calls this check.

    Args:
        args: job's arguments, or a configuration.
        flag: flag that leads to the measurement.
        measured: measured quantity, for the message.
        fix: way to make the choice by hand, in the imperative.
    """
    if argument(args, "deterministic_mode"):
        yield (
            f"{flag} measures {measured}, so that two runs may choose differently and differ in the last "
            f"bits, which --deterministic-mode rules out; {fix}, or train without --deterministic-mode "
            "(--no-deterministic-mode where a job has it by default)"
        )


def timed(work: Callable[[], object], group: Any) -> float:
    """Return the seconds that one call of ``work`` takes. Every rank of the group must call this function."""
    import torch
    import torch.distributed as dist

    platform = platforms.current()
    # The all-reduce is the barrier that lets all ranks start together.
    dist.all_reduce(torch.zeros(1, device=platform.device), group=group)
    platform.synchronize()
    start = time.perf_counter()
    work()
    # Wait for the device, so that its time is measured and not only the launch.
    platform.synchronize()
    return time.perf_counter() - start


def slowest(seconds: Mapping[Key, float], group: Any) -> dict[Key, float]:
    """Return each entry's maximum over the ranks of the group, found by an all-reduce."""
    import torch
    import torch.distributed as dist

    # fp32, because HCCL cannot reduce float64 on most products.
    times = torch.tensor(list(seconds.values()), dtype=torch.float32, device=platforms.current().device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(seconds, times.tolist(), strict=True))
