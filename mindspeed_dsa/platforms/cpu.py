"""The CPU as a platform: everything is done when the call returns, so streams and events are inert."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform as host
import resource
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed_dsa.platforms.base import MemoryFigures, Platform
from mindspeed_dsa.platforms.host_pages import tensor_on

if TYPE_CHECKING:
    import torch


class CpuEvent:
    """An event on a device that has no queue; takes ``torch.cuda.Event``'s arguments.

    ``elapsed_time`` comes from the host clock.
    """

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._timing = enable_timing
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Milliseconds between the two records.

        Raises:
            ValueError: an event without ``enable_timing``, or one that was never recorded.
        """
        for event in (self, end_event):
            if not event._timing or event._seconds is None:
                raise ValueError("elapsed_time needs two recorded events made with enable_timing=True")
        return (end_event._seconds - self._seconds) * 1e3  # type: ignore[operator]


class CpuStream:
    """A stream on a device that has no queue; takes ``torch.cuda.Stream``'s arguments."""

    cuda_stream = 0
    """Handle, as ``torch.cuda.Stream`` has it; 0 is the default stream."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = CpuEvent() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether the queue is empty."""
        return True

    def synchronize(self) -> None:
        pass


DEFAULT_STREAM = CpuStream()
_thread = threading.local()


def current_stream() -> CpuStream:
    """The stream that :func:`use_stream` or :func:`set_stream` chose on this thread."""
    stream: CpuStream = getattr(_thread, "stream", DEFAULT_STREAM)
    return stream


def set_stream(stream: CpuStream | None) -> None:
    """Choose this thread's current stream; ``None`` changes nothing."""
    if stream is not None:
        _thread.stream = stream


@contextlib.contextmanager
def use_stream(stream: CpuStream | None) -> Iterator[None]:
    """:func:`set_stream` for the length of a ``with`` block."""
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def _kilobytes(path: str, key: str) -> int | None:
    """Bytes of a ``key: 123 kB`` line below ``/proc``; ``None`` where there is no such file."""
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
    """Resident set of this process, its peak, and the host's memory.

    Linux tells all of it. Elsewhere only the peak since the start of the process is known; it then
    stands for the current figure too, as the nearest upper bound.
    """
    peak = _kilobytes("/proc/self/status", "VmHWM") or _lifetime_peak()
    current = _kilobytes("/proc/self/status", "VmRSS") or peak
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = _kilobytes("/proc/meminfo", "MemAvailable") or max(total - current, 0)
    # The kernel counts lazily: the high-water mark may lag behind the current figure by some pages.
    return MemoryFigures(current=current, peak=max(peak, current), total=total, free=free)


_CGROUP = "/sys/fs/cgroup"


def host_memory_free() -> int:
    """Bytes of host memory that this process could still get: the system's, or its container's if less."""
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


def processor_name() -> str:
    """Model of the host's processor."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return host.processor() or host.machine()


class CpuPlatform(Platform):
    """Host memory and host threads; gloo between processes."""

    name = "cpu"
    device_type = "cpu"
    backend = "gloo"
    asynchronous = False

    def prepare(self) -> None:
        """Nothing to do."""

    def is_available(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def device_name(self) -> str:
        return processor_name()

    def current_stream(self) -> CpuStream:
        return current_stream()

    def new_stream(self) -> CpuStream:
        return CpuStream()

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return use_stream(stream)

    def new_event(self, timing: bool = False) -> CpuEvent:
        return CpuEvent(enable_timing=timing)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def empty_pinned(self, size: Any, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the system, not of torch's allocator: that one stands for the device, so the two
        pools can be told apart, and their bytes counted, as on an accelerator.
        """
        import torch

        shape = torch.Size([size] if isinstance(size, int) else size)
        nbytes = shape.numel() * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return tensor_on(mmap.mmap(-1, nbytes)).view(dtype).view(shape)

    def release_pinned(self) -> None:
        """Nothing to do: pages go back with their tensor."""

    def empty_mapped(self, numel: int, dtype: torch.dtype, owner: object) -> torch.Tensor:
        """Memory of the pool that stands for the host's."""
        from mindspeed_dsa.platforms import host_pool

        return host_pool.shared.keep(numel * dtype.itemsize, owner).view(dtype)

    def memory(self) -> MemoryFigures:
        return process_memory()

    def reset_peak_memory(self) -> None:
        reset_peak_memory()
