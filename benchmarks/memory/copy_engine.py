"""CPU platform whose side streams copy during computation, over a link of a chosen rate.

It emulates a device with copy engines: each side stream has a thread, which makes its copies in order and
then sleeps for the link's time. Megatron, kernels and memory are the CPU's.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_dsa.platforms.cpu import DEFAULT_STREAM, CpuEvent, CpuPlatform, CpuStream, current_stream

VARIABLE = "BENCHMARK_COPY_ENGINE"
"""Environment variable that selects this platform in a job: bytes per second and direction."""


class EngineStream(CpuStream):
    """Queue of copies and events, processed by a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        """Queue ``work`` behind all earlier work."""
        self._work.put(work)

    def synchronize(self) -> None:
        """Block until the queue is empty."""
        done = threading.Event()
        self.put(done.set)
        done.wait()

    def _run(self) -> None:
        while True:
            self._work.get()()


class EngineEvent(CpuEvent):
    """Event on a side stream, or on the host, where it is complete once recorded."""

    def __init__(self, timing: bool = False) -> None:
        super().__init__(enable_timing=timing)
        self._past = threading.Event()

    def record(self, stream: Any = None) -> None:
        """Record the event on a stream, by default the current one."""
        stream = current_stream() if stream is None else stream
        if isinstance(stream, EngineStream):
            stream.put(self._pass)
        else:
            # The host has already done everything before this call.
            self._pass()

    def _pass(self) -> None:
        super().record()
        self._past.set()

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait, by default the current one; the host blocks."""
        stream = current_stream() if stream is None else stream
        if isinstance(stream, EngineStream):
            stream.put(self.synchronize)
        else:
            self._past.wait()

    def query(self) -> bool:
        """Return whether the event is complete."""
        return self._past.is_set()

    def synchronize(self) -> None:
        """Block until the event is complete."""
        self._past.wait()


class CopyEnginePlatform(CpuPlatform):
    """CPU platform whose copies on side streams take a link's time and none of the computation's.

    Args:
        rate: bytes per second in each direction.

    Attributes:
        copied: bytes copied so far.
    """

    asynchronous = True

    def __init__(self, rate: float) -> None:
        self._rate, self.copied = rate, 0
        self._streams: list[EngineStream] = []

    def new_stream(self) -> EngineStream:
        """Return a side stream."""
        self._streams.append(EngineStream())
        return self._streams[-1]

    def new_event(self, timing: bool = False) -> EngineEvent:
        """Return an event, not yet recorded."""
        return EngineEvent(timing)

    def synchronize(self) -> None:
        """Block until all side streams are done."""
        for stream in self._streams:
            stream.synchronize()

    def copy_async(self, destination: Tensor, source: Tensor) -> EngineEvent:
        """Copy on the current stream; on the host's own stream copy at once."""
        stream = current_stream()
        assert isinstance(stream, EngineStream) or stream is DEFAULT_STREAM

        def copy() -> None:
            begin = time.perf_counter()
            destination.copy_(source)
            # 1 MB at 1 GB/s takes 1 ms, of which the copy itself is a part.
            time.sleep(max(0.0, begin + source.nbytes / self._rate - time.perf_counter()))

        self.copied += source.nbytes
        if isinstance(stream, EngineStream):
            stream.put(copy)
        else:
            destination.copy_(source)
        event = self.new_event()
        event.record(stream)
        return event
