"""Bytes on the device: live storages, and allocated memory.

On a CPU the device is torch's allocator, and host memory is this library's pool.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from mindspeed_dsa import platforms
from mindspeed_dsa.platforms import host_pool


def live_bytes() -> int:
    """Return the bytes of device storages of all tensors that Python can reach, each storage once."""
    gc.collect()
    return storage_bytes(each for each in gc.get_objects() if _is_on_device(each))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each storage once."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def _is_on_device(candidate: Any) -> bool:
    # Compare types: isinstance would query proxies, for example torch's lazy modules, and load them.
    return (
        issubclass(type(candidate), Tensor)
        and not issubclass(type(candidate), DTensor)  # the wrapped tensor is counted itself
        and candidate.device.type == platforms.current().device_type
        and _has_storage(candidate)
        and not host_pool.shared.holds(candidate)
    )


def _has_storage(tensor: Tensor) -> bool:
    """Return whether the tensor has memory: compilation leaves fake tensors, which only name a device."""
    if issubclass(type(tensor), FakeTensor):
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


@contextmanager
def allocations(held: list[int]) -> Iterator[None]:
    """Append the bytes held after each allocation and release, as torch's CPU allocator reports them.

    Args:
        held: list of levels; its last item is the level at which the block begins.
    """
    with _profiled() as events:
        yield
    before = held[-1]
    held += [before + level for _, level in _levels(events)]


def peak_bytes(work: Callable[[], Any], lead_in: Callable[[], Any] = lambda: None) -> int:
    """Return peak bytes held on the device during ``work``, minus the level before ``lead_in``."""
    platform = platforms.current()
    if platform.name == "cpu":
        # The CPU's allocator reports the release only of allocations that it recorded: record both functions.
        with _profiled() as events:
            lead_in()
            with torch.autograd.profiler.record_function(_WORK):
                work()
        (start,) = (event.start_ns() for event in events if event.name() == _WORK)
        levels = _levels(events)
        at_start = [level for time, level in levels if time < start][-1:]
        return max([0, *at_start, *(level for time, level in levels if time >= start)])
    platform.synchronize()
    before = platform.memory().current
    lead_in()
    platform.synchronize()
    platform.reset_peak_memory()
    work()
    platform.synchronize()
    return platform.memory().peak - before


def profiled_levels(work: Callable[[], Any], mark: str) -> tuple[list[tuple[int, int]], list[int]]:
    """Run ``work`` on a CPU; return levels, and the times of a mark in ns.

    Args:
        work: function to profile.
        mark: name of a ``record_function``.

    Returns:
        Pairs of time in ns and bytes held after each allocation and release; times at which the mark began.
    """
    with _profiled() as events:
        work()
    return _levels(events), [event.start_ns() for event in events if event.name() == mark]


_WORK = "benchmarks.memory: work"


@contextmanager
def _profiled() -> Iterator[list[Any]]:
    """Yield a list that gets the torch profiler's events of the block when it ends."""
    events: list[Any] = []
    gc.collect()
    gc.disable()  # earlier garbage must not be freed meanwhile
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            yield events
    finally:
        gc.enable()
    events += profile.kineto_results.events()


def _levels(events: Iterable[Any]) -> list[tuple[int, int]]:
    """Return the time in ns, and the bytes held above the initial level, after each allocator event."""
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda event: event.start_ns())
    levels = accumulate(event.nbytes() for event in memory)
    return [(event.start_ns(), level) for event, level in zip(memory, levels, strict=True)]
