"""Host memory: how much there is, and one pool of the buffers that a device copies from and to.

The pool accounts for every byte. Pinning memory costs far more than using it, so buffers are reused, in size
classes. On a CPU the pool is memory of its own kind as well (see :meth:`CpuPlatform.empty_pinned`), so what
torch's allocator holds is the device's and what the pool holds is the host's.
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
_STEPS = 4  # size classes between a power of two and the next: at most a fifth of a buffer is unused


# How much memory the host and this process have, in bytes.


def _kilobytes(path: str, key: str) -> int | None:
    """Return the bytes of a ``key: 123 kB`` line below ``/proc``; ``None`` where there is no such file."""
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
    """Return the resident set of this process, its peak, and the host's memory.

    Linux reports all of it. Elsewhere only the peak since the start of the process is known, which is
    then reported as the current figure too: it is the nearest upper bound.
    """
    peak = _kilobytes("/proc/self/status", "VmHWM") or _lifetime_peak()
    current = _kilobytes("/proc/self/status", "VmRSS") or peak
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = _kilobytes("/proc/meminfo", "MemAvailable") or max(total - current, 0)
    # The kernel counts lazily: the high-water mark may lag behind the current figure by some pages.
    return MemoryFigures(current=current, peak=max(peak, current), total=total, free=free)


def host_memory_free() -> int:
    """Return the bytes that this process could still get: the system's, or its container's if less."""
    free = process_memory().free
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        figures = []
        for name in ("memory.max", "memory.current"):
            with open(f"{_CGROUP}/{name}", encoding="ascii") as file:
                figures.append(int(file.read()))
        limit, current = figures
        with open(f"{_CGROUP}/memory.stat", encoding="ascii") as file:
            lines = dict(line.split() for line in file)
        free = min(free, limit - current + int(lines.get("inactive_file", 0)))  # files give way
    return max(free, 0)


def reset_peak_memory() -> None:
    """Let the peak start again; where the system does not allow it, the peak stays that of the process."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as control:
        control.write("5")  # proc(5): 5 resets VmHWM to the current resident set


_free_at_start = host_memory_free()  # processes import this while they start, before any takes its share


def local_processes() -> int:
    """Return the processes of the job on this host, as torchrun counts them; one without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


# The pool.


_platform: Callable[[], Platform]
"""Returns the platform that pins the memory."""


def pin_with(platform: Callable[[], Platform]) -> None:
    """Pin memory by what ``platform`` returns at that time; platforms themselves take from the pool."""
    global _platform
    _platform = platform


@dataclass(frozen=True)
class HostFigures:
    """Bytes of a pool."""

    in_use: int
    """In buffers that were taken and not given back."""
    held: int
    """In all buffers, those kept for reuse included."""
    peak: int
    """Most bytes held so far."""


class HostBuffer:
    """Bytes on the host, taken from a pool.

    Attributes:
        tensor: uint8, shape ``[nbytes]``; the length asked for.
    """

    def __init__(self, pool: HostPool, whole: torch.Tensor, nbytes: int) -> None:
        self._pool, self._whole = pool, whole
        self.tensor = whole[:nbytes]

    def as_tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the same bytes as a tensor of that type and shape."""
        return self.tensor.view(dtype).view(shape)

    def give_back(self, after: Event | None = None) -> None:
        """Let the pool hand the bytes out again.

        Args:
            after: recorded behind the last copy from or to the buffer; the bytes are not handed out
                before it is done. ``None``: no copy is under way.
        """
        self._pool._take_back(self._whole, after)


class HostPool:
    """Buffers in pinned host memory of the current platform, reused by size class."""

    def __init__(self) -> None:
        # Buffers may be given back by the garbage collector, which runs anywhere, in here too.
        self._lock = threading.RLock()
        self._kept: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._pending: list[tuple[torch.Tensor, Event]] = []
        self._addresses: set[int] = set()
        self._in_use = self._held = self._peak = 0

    def take(self, nbytes: int, exact: bool = False, remedy: str = "use less of it") -> HostBuffer:
        """Return a buffer of at least ``nbytes`` bytes, with what was in it before.

        Args:
            nbytes: length of :attr:`HostBuffer.tensor`.
            exact: not rounded up to a size class; for buffers that are kept for good.
            remedy: what the user can do if the host has no memory left.

        Raises:
            SettingsError: it has none left.
        """
        import torch

        size = max(nbytes, 1) if exact else size_class(nbytes)
        with self._lock:
            self._collect()
            kept = self._kept[size]
            if kept:
                whole = kept.pop()
            else:
                if size > host_memory_free():  # what is kept in other size classes may be enough
                    self.release_kept()
                held = f"host pool, beside the {self._held / 2**30:.2f} GiB that it holds"
                # The other processes hold theirs already, or ask for themselves when they grow.
                require_host_memory(size, held, remedy, processes=1)
                whole = _platform().empty_pinned((size,), torch.uint8)
                self._addresses.add(whole.untyped_storage().data_ptr())
                self._held += _pinned(whole)
                self._peak = max(self._peak, self._held)
            self._in_use += _pinned(whole)
        return HostBuffer(self, whole, nbytes)

    def keep(self, nbytes: int, owner: object) -> torch.Tensor:
        """Return bytes that count as in use for as long as ``owner`` lives, and are never handed out again.

        Args:
            nbytes: how many.
            owner: outlives every use of the bytes that the pool's figures should count.

        Returns:
            uint8, shape ``[nbytes]``.
        """
        buffer = self.take(nbytes, exact=True)
        address = buffer.tensor.untyped_storage().data_ptr()
        weakref.finalize(owner, self._forget, address, _pinned(buffer.tensor))
        return buffer.tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor lies in a buffer of this pool."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def figures(self) -> HostFigures:
        """Return the bytes now."""
        with self._lock:
            self._collect()
            return HostFigures(self._in_use, self._held, self._peak)

    def release_kept(self) -> None:
        """Give unused memory back to the system."""
        with self._lock:
            self._collect()
            for whole in (buffer for kept in self._kept.values() for buffer in kept):
                self._addresses.discard(whole.untyped_storage().data_ptr())
                self._held -= _pinned(whole)
            self._kept.clear()
        _platform().release_pinned()

    def _take_back(self, whole: torch.Tensor, after: Event | None) -> None:
        with self._lock:
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
        self._kept[whole.numel()].append(whole)
        self._in_use -= _pinned(whole)


def upload(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a few numbers of the host on a device, in the order of its current stream; nobody waits.

    NPUs copy memory that is not pinned only when all work on the stream is done, and CUDA by way of a
    buffer.

    Args:
        numbers: on the host, or on the device already.
        device: any; a CPU gets the tensor itself.

    Returns:
        A tensor like ``numbers``.
    """
    if numbers.device.type == "cpu" and device.type not in ("cpu", "meta"):
        # Torch's own pinned memory: it is handed out again once the copy is done.
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def download(numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to copy a few numbers of a device to the host.

    Args:
        numbers: not to be changed by another stream before the result is called.

    Returns:
        A function that waits for the copy, but not for work that came after it, and returns the numbers.
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
    """Return uint8 ``[len(pages)]`` on pages of the system; they live as long as the tensor's storage."""
    import torch

    return torch.frombuffer(pages, dtype=torch.uint8)


def size_class(nbytes: int) -> int:
    """Return the smallest size class of at least ``nbytes``: powers of two from a page on, and quarters."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    half = 1 << (nbytes - 1).bit_length() - 1  # the largest power of two below nbytes
    step = half // _STEPS
    return half + -(-(nbytes - half) // step) * step


def _pinned(tensor: torch.Tensor) -> int:
    nbytes: int = tensor.untyped_storage().nbytes()
    return nbytes


def require_host_memory(nbytes: int, who: str, remedy: str, processes: int | None = None) -> None:
    """Refuse, before training starts, a demand that the host has no room for.

    Each process asks for itself, before or after others have taken theirs. So what all of them need is
    compared with what the host had when this process started, and what this one needs with what is left.

    Args:
        nbytes: pinned memory that this process is going to need.
        who: name of the feature.
        remedy: what the user can do.
        processes: of this host that need as much; default: all of the job's.

    Raises:
        SettingsError: less is free.
    """
    processes = local_processes() if processes is None else processes
    free = host_memory_free()
    needs = f"{who}: needs {nbytes / 2**30:.2f} GiB of pinned host memory in this process"
    if nbytes > free:
        raise SettingsError(f"{needs}, but the host has {free / 2**30:.2f} GiB free; {remedy}")
    together = processes * (shared.figures().held + nbytes)
    free = max(free, _free_at_start)
    if processes > 1 and together > free:
        raise SettingsError(
            f"{needs}, and in {processes} processes on this host {together / 2**30:.2f} GiB with what they "
            f"hold already, but the host had {free / 2**30:.2f} GiB free; {remedy}"
        )


shared = HostPool()
"""The pool of this process; every feature takes its buffers here, so they share what is kept."""
