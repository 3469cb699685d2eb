"""A platform that detects unordered accesses to the same memory from several streams.

On a CPU everything runs in program order, so a missing wait changes no number. Here each stream has a vector
clock, which events carry and waits merge. Two accesses to the same bytes, one of them a write, are a race
unless the later one's stream has waited for the earlier one's. The host and the current stream count as one.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_dsa import platforms
from mindspeed_dsa.platforms import cpu


class OrderedStream(cpu.CpuStream):
    """Stream that records, for each stream, how far this one has waited for it."""

    def __init__(self, host: OrderedStream | None = None) -> None:
        super().__init__()
        self.clock: dict[OrderedStream, int] = defaultdict(int)
        self._host = host

    def seen(self) -> dict[OrderedStream, int]:
        """Return a copy of the clock, with all work on this stream."""
        return dict(self.clock)

    def take(self, clock: Mapping[OrderedStream, int]) -> None:
        """Order later work here after everything in the clock."""
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
    """Event that carries a clock."""

    def __init__(self, host: OrderedStream) -> None:
        super().__init__()
        self.clock: dict[OrderedStream, int] = {}
        self._host = host

    def record(self, stream: Any = None) -> None:
        self.clock = (stream or cpu.current_stream()).seen()

    def wait(self, stream: Any = None) -> None:
        (stream or cpu.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self._host.take(self.clock)


@dataclass(frozen=True)
class Access:
    """Read or write of bytes ``[first, last)`` by a stream, at a time of its clock."""

    first: int
    last: int
    writes: bool
    stream: OrderedStream
    time: int


class OrderedPlatform(cpu.CpuPlatform):
    """CPU with the streams and events above.

    Attributes:
        races: descriptions of races found.
        used: pairs of storage address and side stream, for storages that the allocator may reuse before the
            stream is done with them.
        freed_early: tensors, recorded only with ``results``, that were freed while another stream than the
            allocating one, which may get the memory again, might still use them.
        results: whether results of functions count as written by them. They are then in new memory, as on a
            device, whose allocator returns memory to the stream that had it.
    """

    asynchronous = True

    def __init__(self, results: bool = False) -> None:
        self.results = results
        self.host = OrderedStream()
        self.races: list[str] = []
        self.used: set[tuple[int, OrderedStream]] = set()
        self.freed_early: list[str] = []
        self._accesses: dict[int, list[Access]] = defaultdict(list)
        self._kept_for: set[tuple[int, OrderedStream]] = set()
        self._switches: list[tuple[int, OrderedStream]] = []
        self._accumulators: dict[Any, OrderedStream] = {}
        self._between = False

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:  # type: ignore[override]
        """Use a stream as on any CPU; backward of the block's work belongs to it, too."""
        before = cpu.current_stream()
        self._switches.append((torch.autograd._get_sequence_nr(), stream))
        with cpu.use_stream(stream):
            yield
        self._switches.append((torch.autograd._get_sequence_nr(), before))

    def stream_of(self, node: Any) -> OrderedStream:
        """Return the stream that was current when a graph node was made."""
        if node in self._accumulators:
            return self._accumulators[node]
        number = node._sequence_nr()
        stream_then = self.host
        for first, stream in self._switches:
            if first > number:
                break
            stream_then = stream
        return stream_then

    def new_stream(self) -> OrderedStream:
        return OrderedStream(self.host)

    def new_event(self, timing: bool = False) -> OrderedEvent:
        return OrderedEvent(self.host)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Record the use: the allocator then waits, so the next user of the memory need not."""
        first, last = _span(tensor)
        place = tensor.untyped_storage().data_ptr()
        self.used.discard((place, stream))
        self._kept_for.add((place, stream))
        if not self.results:
            kept = self._accesses[self._part(tensor)]
            kept[:] = [
                each for each in kept if each.stream is not stream or each.last <= first or last <= each.first
            ]

    def _part(self, tensor: Tensor) -> int:
        """Return the key of accesses that may overlap the tensor's: with ``results`` its storage, else 0."""
        return tensor.untyped_storage().data_ptr() if self.results else 0

    def made(self, what: str, tensor: Tensor) -> None:
        """Record that an operation has returned the tensor, in memory of its own."""
        storage = tensor.untyped_storage()
        place, owner = storage.data_ptr(), cpu.current_stream()
        self._forget(place)
        weakref.finalize(storage, self._freed, place, owner, f"{what} {tuple(tensor.shape)}")
        self.saw(what, tensor, writes=True)

    def _forget(self, place: int) -> None:
        self._accesses.pop(place, None)
        self._kept_for = {each for each in self._kept_for if each[0] != place}

    def _freed(self, place: int, owner: OrderedStream, what: str) -> None:
        """Check that later work of the allocating stream may reuse the memory."""
        awaited = [owner, *(stream for kept, stream in self._kept_for if kept == place)]
        for each in self._accesses.get(place, ()):
            if not any(each.stream is one or one.clock[each.stream] >= each.time for one in awaited):
                self.freed_early.append(what)
                break
        self._forget(place)

    def saw(self, what: str, tensor: Tensor, writes: bool) -> None:
        """Record that an operation has read or written the tensor on the current stream."""
        if self._between:
            return
        stream = cpu.current_stream()
        first, last = _span(tensor)
        if first == last:
            return
        stream.clock[stream] += 1
        if stream is not self.host:
            self.used.add((tensor.untyped_storage().data_ptr(), stream))
        new = Access(first, last, writes, stream, stream.clock[stream])
        kept = []
        for old in self._accesses[self._part(tensor)]:
            apart = old.last <= first or last <= old.first or not (writes or old.writes)
            if not apart and stream.clock[old.stream] < old.time:
                self.races.append(f"{what} {'writes' if writes else 'reads'} {tuple(tensor.shape)}")
            same = first <= old.first and old.last <= last
            # The new access replaces those that it overwrites, and earlier ones of its kind and stream.
            if not (same and (writes or (old.stream is stream and not old.writes))):
                kept.append(old)
        self._accesses[self._part(tensor)] = [*kept, new]


class _Watching(TorchDispatchMode):
    def __init__(self, platform: OrderedPlatform) -> None:
        super().__init__()
        self._platform = platform

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.__name__.startswith(("new_", "empty_like", "set_")):
            return result  # depends on a size only, or shares a tensor's memory
        schema = function._schema.arguments
        bound = {**dict(zip((each.name for each in schema), args, strict=False)), **(kwargs or {})}
        addresses = {each.untyped_storage().data_ptr() for each in _tensors(bound)}
        for argument in schema:
            alias = argument.alias_info
            if alias is not None and not alias.is_write:
                continue  # a view: nothing is read
            for tensor in _tensors(bound.get(argument.name)):
                self._platform.saw(function.__name__, tensor, alias is not None)
        for tensor in _tensors(result) if self._platform.results else ():
            if tensor.untyped_storage().data_ptr() not in addresses:
                self._platform.made(function.__name__, tensor)
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(values) if isinstance(each, Tensor)]


@contextmanager
def watched(results: bool = False) -> Iterator[OrderedPlatform]:
    """Use the platform in the block."""
    platform = OrderedPlatform(results)
    with (
        mock.patch.object(platforms, "_current", platform),
        cpu.use_stream(platform.host),
        _Watching(platform),
    ):
        yield platform


@contextmanager
def backward_by_streams(platform: OrderedPlatform) -> Iterator[None]:
    """Run backward as on a device: a node runs on its forward's stream, after the nodes before it.

    A node that accumulates a leaf's gradient is made on first access, and belongs to the stream that is
    current then. Sums of gradients before they reach a node are not watched.
    """
    backward, edge_of = torch.autograd.backward, torch.autograd.graph.get_gradient_edge

    def get_gradient_edge(tensor: Tensor) -> Any:
        edge = edge_of(tensor)
        platform._accumulators.setdefault(edge.node, cpu.current_stream())
        return edge

    def followed(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        with ExitStack() as stack:
            _follow(platform, [each.grad_fn for each in roots if each.grad_fn is not None], stack)
            backward(tensors, grad_tensors, *args, **kwargs)
        platform._between = False

    with (
        mock.patch.object(torch.autograd, "backward", followed),
        mock.patch.object(torch.autograd.graph, "get_gradient_edge", get_gradient_edge),
    ):
        yield


def _follow(platform: OrderedPlatform, roots: list[Any], stack: ExitStack) -> None:
    arriving: dict[Any, list[Mapping[OrderedStream, int]]] = defaultdict(list)
    begun = platform.host.seen()

    def hook(node: Any) -> None:
        stream = platform.stream_of(node)
        running = ExitStack()

        def before(gradients: Any) -> None:
            platform._between = False
            running.enter_context(cpu.use_stream(stream))
            for clock in arriving.pop(node, [begun]):
                stream.take(clock)
            for gradient in _tensors(gradients):
                platform._kept_for.add((gradient.untyped_storage().data_ptr(), stream))

        def after(gradients: Any, outputs: Any) -> None:
            for following, _ in node.next_functions:
                if following is not None:
                    arriving[following].append(stream.seen())
            running.close()
            platform._between = True

        stack.callback(node.register_prehook(before).remove)
        stack.callback(node.register_hook(after).remove)

    seen, todo = set(), list(roots)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is None:
                continue
            todo.append(following)
            if following.name().endswith("AccumulateGrad"):
                first = platform.stream_of(node)  # the first node met
                platform._accumulators.setdefault(following, first)
        hook(node)


@contextmanager
def as_on_a_device(platform: OrderedPlatform) -> Iterator[None]:
    """Use the platform's streams and events for Megatron's schedule of pairs and for its transfers.

    A transfer reads after the work of the stream that starts it; waiting for it orders later work after it.
    """
    from megatron.core.pipeline_parallel import utils

    from mindspeed_dsa.parallel.all_to_all import InFlight
    from mindspeed_dsa.parallel.transfers import Pending

    send, wait = InFlight.send, Pending.wait

    def sent(self: Any, *args: Any, **kwargs: Any) -> Any:
        pending = send(self, *args, **kwargs)
        pending.clock = cpu.current_stream().seen()
        return pending

    def awaited(self: Any) -> Tensor:
        cpu.current_stream().take(self.clock)
        return wait(self)

    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Event", lambda *_, **__: platform.new_event()),
        (torch.cuda, "Stream", lambda *_, **__: platform.new_stream()),
        (Tensor, "record_stream", lambda tensor, stream: platform.record_stream(tensor, stream)),
        (utils, "_COMP_STREAM", None),
        (utils, "_COMM_STREAM", None),
        (InFlight, "send", sent),
        (Pending, "wait", awaited),
    ]
    with ExitStack() as stack:
        for holder, name, value in replaced:
            stack.enter_context(mock.patch.object(holder, name, value))
        yield


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the range of addresses that a tensor spans."""
    if tensor.numel() == 0:
        return 0, 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()
