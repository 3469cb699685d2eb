"""Pool of pinned host buffers for copies from and to the device, and the amount of available host memory.

Pinning memory is slow, so buffers are reused in size classes. The pool counts every byte that it has pinned.
On the CPU platform, memory from torch's allocator plays the role of device memory. The pool therefore takes
its buffers from the system, and the two are counted separately (see :meth:`CpuPlatform.empty_pinned`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.platforms.base import Event, MemoryFigures, Platform

if TYPE_CHECKING:
    import torch


_CGROUP = "/sys/fs/cgroup"
_SMALLEST = 4096  # a page
# Size classes between a power of two and the next one: 4, 5, 6, 7, 8 KiB, and so on. At most a fifth of a
# buffer is unused.
_STEPS = 4


# How much memory the host and this process have, in bytes.


def _kilobytes(path: str, key: str) -> int | None:
    """Return the bytes of a ``key: 123 kB`` line of a file in ``/proc``, or ``None`` without that file."""
    try:
        with open(path, encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith(f"{key}:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _lifetime_peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def process_memory() -> MemoryFigures:
    """Return the resident set of this process, its peak, and the host's memory."""
    # Linux reports all of these. Elsewhere only the peak since the start of the process is known, and is
    # also returned as the current value, as the best upper bound.
    peak = _kilobytes("/proc/self/status", "VmHWM") or _lifetime_peak()
    current = _kilobytes("/proc/self/status", "VmRSS") or peak
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = _kilobytes("/proc/meminfo", "MemAvailable") or max(total - current, 0)
    # The kernel updates counters lazily, so the peak may lag behind the current value by some pages.
    return MemoryFigures(current=current, peak=max(peak, current), total=total, free=free)


def host_memory_free() -> int:
    """Return the bytes that this process can still allocate, on the system and in its container."""
    free = process_memory().free
    with contextlib.suppress(OSError, ValueError):  # no container, or a container without a limit ("max")
        figures = []
        for name in ("memory.max", "memory.current"):
            with open(f"{_CGROUP}/{name}", encoding="ascii") as file:
                figures.append(int(file.read()))
        limit, current = figures
        with open(f"{_CGROUP}/memory.stat", encoding="ascii") as file:
            lines = dict(line.split() for line in file)
        free = min(free, limit - current + int(lines.get("inactive_file", 0)))  # page cache is reclaimable
    return max(free, 0)


def reset_peak_memory() -> None:
    """Reset the peak resident set, if the system allows it; else it stays the peak since process start."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as control:
        control.write("5")  # proc(5): 5 resets VmHWM to the current resident set


# Processes import this module while they start, before any of them allocates its share.
_free_at_start = host_memory_free()


def local_processes() -> int:
    """Return the number of the job's processes on this host, as set by torchrun; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


# The pool.


_platform: Callable[[], Platform]
"""Function that returns the platform that pins the memory."""


def pin_with(platform: Callable[[], Platform]) -> None:
    """Set the function that returns the current platform, which pins the memory of all pools."""
    global _platform
    _platform = platform


@dataclass(frozen=True)
class HostFigures:
    """Byte counts of a pool."""

    in_use: int
    """Bytes of buffers that are taken and not given back."""
    held: int
    """Bytes of all buffers, including those kept for reuse."""


class HostBuffer:
    """Host memory taken from a pool.

    Attributes:
        tensor: uint8 ``[nbytes]`` with the requested number of bytes.
    """

    def __init__(self, pool: HostPool, whole: torch.Tensor, nbytes: int) -> None:
        self._pool, self._whole = pool, whole
        self.tensor = whole[:nbytes]

    def give_back(self, after: Event | None = None) -> None:
        """Return the buffer to the pool.

        Args:
            after: event recorded after the last copy from or to the buffer. The pool reuses the buffer only
                after this event. ``None`` means that no copy is in flight.
        """
        self._pool._take_back(self._whole, after)


class HostPool:
    """Pool of buffers in pinned host memory of the current platform, reused by size class."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may give buffers back at any point, also while the lock is held.
        self._lock = threading.RLock()
        self._kept: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._pending: list[tuple[torch.Tensor, Event]] = []
        self._addresses: set[int] = set()
        self._in_use = self._held = 0

    def take(self, nbytes: int, exact: bool = False, remedy: str = "use less of it") -> HostBuffer:
        """Return a buffer of at least ``nbytes`` bytes with arbitrary content.

        Args:
            nbytes: length of :attr:`HostBuffer.tensor`.
            exact: whether to skip rounding up to a size class; for buffers that are never given back.
            remedy: advice for the user if the host has no memory left.

        Raises:
            SettingsError: the host has too little free memory.
        """
        import torch

        size = max(nbytes, 1) if exact else size_class(nbytes)
        with self._lock:
            self._collect()
            kept = self._kept[size]
            if kept:
                whole = kept.pop()
            else:
                if size > host_memory_free():  # buffers kept in other size classes may free enough
                    self.release_kept()
                held = f"host pool, beside the {self._held / 2**30:.2f} GiB that it holds"
                # processes=1: other processes have allocated theirs, or check for themselves when they grow.
                require_host_memory(size, held, remedy, processes=1)
                whole = _platform().empty_pinned((size,), torch.uint8)
                self._addresses.add(whole.untyped_storage().data_ptr())
                self._held += _pinned(whole)
            self._in_use += _pinned(whole)
        return HostBuffer(self, whole, nbytes)

    def keep(self, nbytes: int, owner: object) -> torch.Tensor:
        """Allocate memory that the pool never reuses. It counts as in use until ``owner`` is deleted.

        Args:
            nbytes: number of bytes.
            owner: object that outlives every use of the bytes.

        Returns:
            uint8 tensor ``[nbytes]``.
        """
        buffer = self.take(nbytes, exact=True)
        address = buffer.tensor.untyped_storage().data_ptr()
        # Refers to the address and size only: a reference to the buffer would keep it alive.
        weakref.finalize(owner, self._forget, address, _pinned(buffer.tensor))
        return buffer.tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is in a buffer of this pool."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def figures(self) -> HostFigures:
        """Return the current byte counts."""
        with self._lock:
            self._collect()
            return HostFigures(self._in_use, self._held)

    def release_kept(self) -> None:
        """Free the buffers that the pool keeps for reuse."""
        with self._lock:
            self._collect()
            for whole in (buffer for kept in self._kept.values() for buffer in kept):
                self._addresses.discard(whole.untyped_storage().data_ptr())
                self._held -= _pinned(whole)
            self._kept.clear()
        _platform().release_pinned()

    def _take_back(self, whole: torch.Tensor, after: Event | None) -> None:
        with self._lock:
            # Buffers with a copy in flight wait in _pending until a later call finds their event done.
            if after is None or after.query():
                self._keep(whole)
            else:
                self._pending.append((whole, after))

    def _forget(self, address: int, size: int) -> None:
        with self._lock:
            self._addresses.discard(address)
            self._held -= size
            self._in_use -= size

    def _collect(self) -> None:
        pending, self._pending = self._pending, []
        for whole, after in pending:
            if after.query():
                self._keep(whole)
            else:
                self._pending.append((whole, after))

    def _keep(self, whole: torch.Tensor) -> None:
        # One byte per element, so numel() is the size class.
        self._kept[whole.numel()].append(whole)
        self._in_use -= _pinned(whole)


def upload(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small tensor from the host to a device on its current stream, without blocking.

    The copy uses pinned memory. From pageable memory, an NPU copies only when all work on the stream is done,
    and CUDA copies through a staging buffer.

    Args:
        numbers: tensor on the host, or already on the device.
        device: target device; on a CPU the tensor itself is returned.

    Returns:
        Tensor like ``numbers`` on the device.
    """
    if numbers.device.type == "cpu" and device.type not in ("cpu", "meta"):
        # torch's pinned allocator reuses the memory only after the copy is done.
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def download(numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start copying a small tensor from a device to the host.

    Args:
        numbers: device tensor. No other stream may change it before the returned function is called.

    Returns:
        Function that waits for the copy, but not for later work, and returns the host tensor.
    """
    import torch

    if numbers.device.type == "cpu":
        return lambda: numbers
    on_host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    done = _platform().copy_async(on_host, numbers)

    def arrived() -> torch.Tensor:
        done.synchronize()
        return on_host

    return arrived


def tensor_on(pages: mmap.mmap) -> torch.Tensor:
    """Return a uint8 tensor ``[len(pages)]`` on system pages, mapped while the tensor's storage lives."""
    import torch

    return torch.frombuffer(pages, dtype=torch.uint8)


def size_class(nbytes: int) -> int:
    """Return the smallest size class of at least ``nbytes``: 4096, or powers of two with quarter steps."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    half = 1 << (nbytes - 1).bit_length() - 1  # the largest power of two below nbytes
    step = half // _STEPS
    # 9000 bytes: half 8192, step 2048, result 10240.
    return half + -(-(nbytes - half) // step) * step


def _pinned(tensor: torch.Tensor) -> int:
    nbytes: int = tensor.untyped_storage().nbytes()
    return nbytes


def require_host_memory(nbytes: int, who: str, remedy: str, processes: int | None = None) -> None:
    """Raise before training starts if the host has too little memory for the requested pinned memory.

    Each process calls this separately, and other processes may already have allocated. Therefore the sum over
    all processes is compared with the memory that was free when this process started, and the process's own
    request with the memory that is free now.

    Args:
        nbytes: pinned memory that this process is going to need.
        who: feature's name.
        remedy: advice for the user.
        processes: number of processes on this host that need as much; default: all of the job's.

    Raises:
        SettingsError: too little memory is free.
    """
    processes = local_processes() if processes is None else processes
    free = host_memory_free()
    needs = f"{who}: needs {nbytes / 2**30:.2f} GiB of pinned host memory in this process"
    if nbytes > free:
        raise SettingsError(f"{needs}, but the host has {free / 2**30:.2f} GiB free; {remedy}")
    # Assume that every process of the host holds, and needs, as much as this one.
    together = processes * (shared.figures().held + nbytes)
    free = max(free, _free_at_start)
    if processes > 1 and together > free:
        raise SettingsError(
            f"{needs}, and in {processes} processes on this host {together / 2**30:.2f} GiB with what they "
            f"hold already, but the host had {free / 2**30:.2f} GiB free; {remedy}"
        )


shared = HostPool()
"""Pool of this process. All features use it, so that they share the buffers kept for reuse."""
