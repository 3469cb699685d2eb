"""A platform that finds accesses to one memory which no stream is made to do one after the other.

On a CPU everything runs in the order in which it is written, so a missing wait changes no number. Here
each stream has a clock, which events carry and waits take over. Two accesses to the same bytes, one of them
a write, are a race unless the later one's stream has waited for the earlier one's. The host and the current
stream count as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_dsa import platforms
from mindspeed_dsa.platforms import cpu


class OrderedStream(cpu.CpuStream):
    """Knows of each stream how far this one has waited for it."""

    def __init__(self, host: OrderedStream | None = None) -> None:
        super().__init__()
        self.clock: dict[OrderedStream, int] = defaultdict(int)
        self._host = host

    def seen(self) -> dict[OrderedStream, int]:
        """The clock now, with all that was done here."""
        return dict(self.clock)

    def take(self, clock: Mapping[OrderedStream, int]) -> None:
        """Later work here comes after what the clock has."""
        for stream, time in clock.items():
            self.clock[stream] = max(self.clock[stream], time)

    def wait_stream(self, stream: OrderedStream) -> None:
        self.take(stream.seen())

    def wait_event(self, event: OrderedEvent) -> None:
        self.take(event.clock)

    def synchronize(self) -> None:
        assert self._host is not None
        self._host.take(self.seen())


class OrderedEvent(cpu.CpuEvent):
    """Carries a clock."""

    def __init__(self, host: OrderedStream) -> None:
        super().__init__()
        self.clock: dict[OrderedStream, int] = {}
        self._host = host

    def record(self, stream: Any = None) -> None:
        self.clock = (stream or cpu.current_stream()).seen()

    def synchronize(self) -> None:
        self._host.take(self.clock)


@dataclass(frozen=True)
class Access:
    """Bytes ``[first, last)`` that a stream has read or written, at a time of its clock."""

    first: int
    last: int
    writes: bool
    stream: OrderedStream
    time: int


class OrderedPlatform(cpu.CpuPlatform):
    """A CPU with the streams and events above.

    Attributes:
        races: what was found, each described.
        used: addresses of storages that side streams have used and that the allocator may give away before
            they are done, with the stream.
        results: whether what functions return counts as written by them. It lies in new memory then, as on a
            device, whose allocator gives a stream back what it has had itself.
    """

    asynchronous = True

    def __init__(self, results: bool = False) -> None:
        self.results = results
        self.host = OrderedStream()
        self.races: list[str] = []
        self.used: set[tuple[int, OrderedStream]] = set()
        self._accesses: list[Access] = []

    def new_stream(self) -> OrderedStream:
        return OrderedStream(self.host)

    def new_event(self, timing: bool = False) -> OrderedEvent:
        return OrderedEvent(self.host)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """The allocator waits, so whoever gets the memory next need not."""
        first, last = _span(tensor)
        self.used.discard((tensor.untyped_storage().data_ptr(), stream))
        self._accesses = [
            each
            for each in self._accesses
            if each.stream is not stream or each.last <= first or last <= each.first
        ]

    def made(self, what: str, tensor: Tensor) -> None:
        """An operation has returned the tensor, in memory of its own."""
        storage = tensor.untyped_storage()
        first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        self._accesses = [each for each in self._accesses if each.last <= first or last <= each.first]
        self.saw(what, tensor, writes=True)

    def saw(self, what: str, tensor: Tensor, writes: bool) -> None:
        """An operation has read or written the tensor on the current stream."""
        stream = cpu.current_stream()
        first, last = _span(tensor)
        if first == last:
            return
        stream.clock[stream] += 1
        if stream is not self.host:
            self.used.add((tensor.untyped_storage().data_ptr(), stream))
        new = Access(first, last, writes, stream, stream.clock[stream])
        kept = []
        for old in self._accesses:
            if old.last <= first or last <= old.first or not (writes or old.writes):
                kept.append(old)
                continue
            if stream.clock[old.stream] < old.time:
                self.races.append(f"{what} {'writes' if writes else 'reads'} {tuple(tensor.shape)}")
            if not (writes and first <= old.first and old.last <= last):  # else the new one stands for it
                kept.append(old)
        self._accesses = [*kept, new]


class _Watching(TorchDispatchMode):
    def __init__(self, platform: OrderedPlatform) -> None:
        super().__init__()
        self._platform = platform

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        schema = function._schema.arguments
        given = {**dict(zip((each.name for each in schema), args, strict=False)), **(kwargs or {})}
        known = {each.untyped_storage().data_ptr() for each in _tensors(given)}
        for argument in schema:
            alias = argument.alias_info
            if alias is not None and not alias.is_write:
                continue  # a view: nothing is read
            for tensor in _tensors(given.get(argument.name)):
                self._platform.saw(function.__name__, tensor, alias is not None)
        for tensor in _tensors(result) if self._platform.results else ():
            if tensor.untyped_storage().data_ptr() not in known:
                self._platform.made(function.__name__, tensor)
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(values) if isinstance(each, Tensor)]


@contextmanager
def watched(results: bool = False) -> Iterator[OrderedPlatform]:
    """The platform, in force for the length of a block."""
    platform = OrderedPlatform(results)
    with (
        mock.patch.object(platforms, "_current", platform),
        cpu.use_stream(platform.host),
        _Watching(platform),
    ):
        yield platform


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes that a tensor spans."""
    if tensor.numel() == 0:
        return 0, 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()
