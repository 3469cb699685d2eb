"""A CPU whose side streams copy beside its computation, over a link of a chosen rate.

The platform stands for a device with copy engines: each side stream has a thread, which makes its copies in
order and then sleeps for as long as the link would have taken. Megatron, kernels and memory are the CPU's.
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
"""Environment variable of a job that is to run on it: bytes a second and direction."""


class EngineStream(CpuStream):
    """A queue of copies and events, worked off by a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        """Do something when all before it is done."""
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
    """A point in the order of a side stream, or of the host, which is past when it is recorded."""

    def __init__(self, timing: bool = False) -> None:
        super().__init__(enable_timing=timing)
        self._past = threading.Event()

    def record(self, stream: Any = None) -> None:
        """Record on a stream, by default the current one."""
        stream = current_stream() if stream is None else stream
        if isinstance(stream, EngineStream):
            stream.put(self._pass)
        else:
            self._pass()

    def _pass(self) -> None:
        super().record()
        self._past.set()

    def wait(self, stream: Any = None) -> None:
        """Let a stream wait, by default the current one; the host's own blocks."""
        stream = current_stream() if stream is None else stream
        if isinstance(stream, EngineStream):
            stream.put(self.synchronize)
        else:
            self._past.wait()

    def query(self) -> bool:
        """Return whether it is past."""
        return self._past.is_set()

    def synchronize(self) -> None:
        """Block until it is past."""
        self._past.wait()


class CopyEnginePlatform(CpuPlatform):
    """CPU platform whose copies on side streams take a link's time and none of the computation's.

    Args:
        rate: bytes a second, in each direction.

    Attributes:
        copied: bytes so far.
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
        """Copy on the current stream; on the host's own at once."""
        stream = current_stream()
        assert isinstance(stream, EngineStream) or stream is DEFAULT_STREAM

        def copy() -> None:
            begin = time.perf_counter()
            destination.copy_(source)
            time.sleep(max(0.0, begin + source.nbytes / self._rate - time.perf_counter()))

        self.copied += source.nbytes
        if isinstance(stream, EngineStream):
            stream.put(copy)
        else:
            destination.copy_(source)
        event = self.new_event()
        event.record(stream)
        return event
