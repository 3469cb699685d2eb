"""CPU platform. Every call completes before it returns, so streams and events have no effect."""

from __future__ import annotations

import contextlib
import math
import mmap
import platform as host
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_dsa.platforms.base import MemoryFigures, Platform
from mindspeed_dsa.platforms.host_pool import process_memory, reset_peak_memory, shared, tensor_on

if TYPE_CHECKING:
    import torch


class CpuEvent:
    """Event of a device without a queue; takes ``torch.cuda.Event``'s arguments.

    ``elapsed_time`` uses the host clock.
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
        """Return the milliseconds between the recordings of this event and ``end_event``.

        Raises:
            ValueError: an event has no ``enable_timing``, or was never recorded.
        """
        for event in (self, end_event):
            if not event._timing or event._seconds is None:
                raise ValueError("elapsed_time needs two recorded events made with enable_timing=True")
        return (end_event._seconds - self._seconds) * 1e3  # type: ignore[operator]


class CpuStream:
    """Stream of a device without a queue; takes ``torch.cuda.Stream``'s arguments."""

    cuda_stream = 0
    """Handle as in ``torch.cuda.Stream``; 0 is the default stream."""

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
        """Return whether the queue is empty."""
        return True

    def synchronize(self) -> None:
        pass


DEFAULT_STREAM = CpuStream()
_thread = threading.local()


def current_stream() -> CpuStream:
    """Return this thread's stream, set by :func:`use_stream` or :func:`set_stream`."""
    stream: CpuStream = getattr(_thread, "stream", DEFAULT_STREAM)
    return stream


def set_stream(stream: CpuStream | None) -> None:
    """Set this thread's current stream; ``None`` changes nothing."""
    if stream is not None:
        _thread.stream = stream


@contextlib.contextmanager
def use_stream(stream: CpuStream | None) -> Iterator[None]:
    """Set the current stream inside a ``with`` block."""
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def processor_name() -> str:
    """Return the model name of the host's processor."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return host.processor() or host.machine()


class CpuPlatform(Platform):
    """Platform without accelerator: host memory and threads, gloo between processes."""

    name = "cpu"
    device_type = "cpu"
    backend = "gloo"
    asynchronous = False

    def prepare(self) -> None:
        """Do nothing."""

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
        """Return memory of the system, outside of torch's allocator.

        torch's allocator plays the role of device memory here, so the two pools can be told apart and counted
        as on an accelerator.
        """
        import torch

        shape = torch.Size([size] if isinstance(size, int) else size)
        nbytes = shape.numel() * dtype.itemsize
        # mmap cannot map 0 bytes.
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        # MAP_PRIVATE: a process forked to write a checkpoint keeps the pages as they were at the fork.
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return tensor_on(pages).view(dtype).view(shape)

    def release_pinned(self) -> None:
        """Do nothing: pages are returned with their tensor."""

    def empty_mapped(self, size: Sequence[int], dtype: torch.dtype, owner: object) -> torch.Tensor:
        """Return memory from the host pool, which CPU kernels access like any other."""
        return shared.keep(math.prod(size) * dtype.itemsize, owner).view(dtype).view(*size)

    def memory(self) -> MemoryFigures:
        return process_memory()

    def reset_peak_memory(self) -> None:
        reset_peak_memory()
