"""Measurements for ``--swap-attention auto``: each layer swaps as much as overlaps with computation.

The first step swaps everything and pins host memory. The second step swaps everything again, and events on
the device's streams record when each storage was saved, copied, requested and read. From the third step on,
each layer swaps its first n storages in saving order, with the largest n that would not have stalled the
device.

Every rank decides independently: swapping has no collectives and does not change results.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.memory.swap_attention.feature import MARGIN, Options
from mindspeed_dsa.megatron import pipeline_steps
from mindspeed_dsa.platforms.base import Event
from mindspeed_dsa.platforms.host_pool import size_class

_SPARE = 0.05
"""Share of the device memory that is left free."""
_MEASURED_STEP = 2


@dataclass(frozen=True)
class Times:
    """Times of one storage in a layer's forward and backward, in seconds.

    Attributes:
        nbytes: size of the storage.
        saved: time of its save, since the first save of the layer.
        out: duration of its copy to the host.
        back: duration of its copy to the device.
        read: time from the request of the layer's storages to the first read of this storage in backward,
            minus stalls for other copies before it. Infinite if the storage never left the device.
    """

    nbytes: int
    saved: float
    out: float
    back: float
    read: float


def hidden(storages: Sequence[Times], end: float) -> int:
    """Return the largest ``n`` for which the first ``n`` storages can be swapped without stalling the device.

    Args:
        storages: times in saving order.
        end: end of the layer's forward, in seconds since its first save.
    """
    # Copies to the host run one after another, and must be done at the layer's end. Backward reads the
    # storages in reverse order, and they are copied back in that order.
    for count in range(len(storages), 0, -1):
        leading = storages[:count]
        gone = back = 0.0
        for times in leading:
            gone = max(gone, times.saved) + MARGIN * times.out
        in_time = gone <= end  # the last copy is done before the layer's forward ends
        for times in reversed(leading):
            back += MARGIN * times.back
            in_time = in_time and back <= times.read
        if in_time:
            return count
    return 0


class Clock:
    """Timing events of one layer's forward and backward for one microbatch."""

    def __init__(self) -> None:
        self.end: Event | None = None
        self.asked: Event | None = None
        self.saved: list[Event] = []
        self.copies: list[Copies] = []
        self.denied: list[int] = []
        """Sizes of the storages that ``--swap-attention-bytes`` has kept on the device."""
        self.above: Clock | None = None
        """Clock of the layer above, whose backward requests this layer's storages."""

    def save(self, copies: Copies) -> None:
        """Record that a storage was saved and its copy to the host started."""
        self.saved.append(now())
        self.copies.append(copies)

    def times(self) -> tuple[list[Times], float] | None:
        """Return the times of all storages and the end of the forward; ``None`` if events are missing."""
        if not self.saved or self.end is None or self.asked is None:
            return None
        asked, stalls = self.asked, self.above.stalls() if self.above is not None else 0.0
        read = [math.inf if copies.read is None else _seconds(asked, copies.read) for copies in self.copies]
        computed = dict.fromkeys(range(len(read)), math.inf)
        # A read that comes after stalls would come earlier without them: subtract all previous stalls.
        for number in sorted(range(len(read)), key=read.__getitem__):
            computed[number] = max(read[number] - stalls, 0.0)
            stalls += self.copies[number].stall()
        storages = [
            Times(
                copies.nbytes,
                _seconds(self.saved[0], saved),
                _lasts(copies.out),
                _lasts(copies.back),
                computed[number],
            )
            for number, (copies, saved) in enumerate(zip(self.copies, self.saved, strict=True))
        ]
        return storages, _seconds(self.saved[0], self.end)

    def stalls(self) -> float:
        """Return the seconds that the device stalled for copies back in this layer's backward."""
        return sum(copies.stall() for copies in self.copies)


@dataclass
class Copies:
    """Timing events of one storage's copies to the host and back.

    Attributes:
        nbytes: size of the storage.
        out, back: events at begin and end of each copy, on the copy streams; ``back`` is ``None`` if the
            storage never left the device.
        read: event of the first read in backward, before the computing stream waits for the copy.
    """

    nbytes: int
    out: tuple[Event, Event] | None = None
    back: tuple[Event, Event] | None = None
    read: Event | None = None

    def stall(self) -> float:
        """Return the seconds that the device stalled for the copy back."""
        if self.back is None or self.read is None:
            return 0.0
        return max(0.0, _seconds(self.read, self.back[1]))


def now(stream: Any = None) -> Event:
    """Record and return a timing event on a stream (default: the current stream)."""
    platform = platforms.current()
    event = platform.new_event(timing=True)
    event.record(platform.current_stream() if stream is None else stream)
    return event


def _lasts(copy: tuple[Event, Event] | None) -> float:
    # A storage that stayed on the device has no copy.
    return 0.0 if copy is None else _seconds(*copy)


def _seconds(begin: Any, end: Any) -> float:
    return float(begin.elapsed_time(end)) / 1e3  # milliseconds


@dataclass
class OfLayer:
    """Measurements and decision of one layer.

    Attributes:
        name: name of the layer in messages.
        clocks: events of the layer's passes (one per microbatch) in the measured step.
        open: number of passes with a live autograd graph.
        most: maximum of ``open``.
        limit: number of storages that a pass swaps; ``None`` for all.
        nbytes: sizes of the storages that a pass could swap, in saving order.
    """

    name: str
    clocks: list[Clock] = field(default_factory=list)
    open: int = 0
    most: int = 0
    limit: int | None = None
    nbytes: list[int] = field(default_factory=list)

    def decide(self, asynchronous: bool) -> None:
        """Set :attr:`limit` from the passes with complete events; to ``None`` if there are none.

        Args:
            asynchronous: whether copies overlap with computation; otherwise nothing is swapped.
        """
        clocks, self.clocks = self.clocks, []
        whole = [clock.times() for clock in clocks if not clock.denied]
        # The slowest pass decides for all passes of the layer.
        counts = [hidden(*times) if asynchronous else 0 for times in whole if times is not None]
        self.limit = min(counts) if counts else None
        # The pass with the most bytes, whether its storages were swapped or denied.
        sizes = [[*(copies.nbytes for copies in clock.copies), *clock.denied] for clock in clocks]
        self.nbytes = max(sizes, key=sum, default=[])

    def stays(self) -> int:
        """Return the bytes that :attr:`limit` keeps on the device while ``most`` passes are open."""
        return self.most * sum(self.nbytes[self.limit :]) if self.limit is not None else 0


class Choice(pipeline_steps.Follower):
    """Measurements and limits of swapping for all layers, updated as training steps begin."""

    def __init__(self, context: Context[Options]) -> None:
        super().__init__(context)
        self._measures, self._log = context.options.measures, context.log
        self._layers: WeakKeyDictionary[Any, OfLayer] = WeakKeyDictionary()
        # Layer's pass by the storage of its output, in which the layer above finds the pass below. Not by the
        # tensor: FSDP2 inserts a node between layers, which returns another one.
        self.pass_of_output: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._most_bytes = context.options.most_bytes
        self._on_host = 0
        self._step, self._measured, self._microbatches = 0, _MEASURED_STEP, 0
        self._kept = 0.0  # bytes that limits keep on the device

    def begins(self, step: dict[str, Any]) -> bool:
        """Count a training step that begins; after the measured step, set the limit of every layer.

        A later step with more microbatches is measured again, as more of them may be in flight.
        """
        self._step += 1
        microbatches = step.get("num_microbatches", 0)
        if self._measures and self._step == self._measured + 1:
            self._decide()
        if self._step <= self._measured:
            self._microbatches = microbatches
        elif microbatches > self._microbatches:
            self._measured, self._microbatches = self._step, microbatches
        return False

    def starts(self, layer: Any, layer_pass: Any) -> tuple[int | None, Clock | None]:
        """Register a forward of ``layer``.

        Returns:
            Number of storages that it may swap (``None``: no limit), and a clock in the measured step.
        """
        if not self._measures:
            return None, None
        record = self._layers.setdefault(layer, OfLayer(f"layer {layer.layer_number}"))
        if self._step != self._measured:
            return record.limit, None
        clock = Clock()
        record.clocks.append(clock)
        record.open += 1
        record.most = max(record.most, record.open)
        weakref.finalize(layer_pass, _closed, record)
        return None, clock

    def may_take(self, nbytes: int) -> bool:
        """Return whether another ``nbytes`` on the host stay within ``--swap-attention-bytes``."""
        return self._most_bytes is None or self._on_host + size_class(nbytes) <= self._most_bytes

    def takes(self, swapped: Any) -> None:
        """Count the host buffer of a swapped storage until the storage is deleted."""
        nbytes = size_class(swapped.nbytes)
        self._on_host += nbytes
        weakref.finalize(swapped, self._gives_back, nbytes)

    def _gives_back(self, nbytes: int) -> None:
        self._on_host -= nbytes

    def _decide(self) -> None:
        platform = platforms.current()
        platform.synchronize()
        layers = [layer for layer in self._layers.values() if layer.clocks]
        for layer in layers:
            layer.decide(platform.asynchronous)
        limits = [layer.limit for layer in layers if layer.limit is not None]
        for layer in layers:
            if layer.limit is None:  # --swap-attention-bytes left no complete pass to measure
                layer.limit = min(limits, default=0)
        # The peak contains what earlier limits have kept.
        beyond = keep_within(layers, _room(platform) + self._kept)
        self._kept = sum(layer.stays() for layer in layers)
        swapped = sum(sum(layer.nbytes[: layer.limit]) for layer in layers)
        reason = f"as the copies and the computation of step {self._measured} allow"
        if not platform.asynchronous:
            reason = f"because copies on {platform.name} are waited for, so that none is hidden"
        self._log.info(
            "swap-attention: %.0f of %.0f MiB of a microbatch are swapped from here on, in %d of %d layers, "
            "%s%s",
            swapped / 2**20,
            sum(sum(layer.nbytes) for layer in layers) / 2**20,
            sum(bool(layer.nbytes[: layer.limit]) for layer in layers),
            len(layers),
            reason,
            f"; {beyond} of them more than is hidden, which the device has no room for" if beyond else "",
            ranks="stage",
        )


def _closed(layer: OfLayer) -> None:
    layer.open -= 1


def _room(platform: Any) -> float:
    """Return the free device memory in bytes at the peak of all steps so far."""
    memory = platform.memory()
    # `free` accounts for memory outside the allocator: contexts, communication buffers, other processes.
    return float(min(memory.total * (1 - _SPARE) - memory.peak, memory.free))


def keep_within(layers: Sequence[OfLayer], room: float) -> int:
    """Remove limits, largest first, until the storages kept on the device fit; return how many were removed.

    Args:
        layers: layers to modify. ``limit`` becomes ``None`` (swap everything), first for layers that keep the
            most bytes on the device.
        room: free device memory in bytes.
    """
    beyond = 0
    for layer in sorted(layers, key=OfLayer.stays, reverse=True):
        if sum(each.stays() for each in layers) <= room:
            break
        layer.limit, beyond = None, beyond + 1
    return beyond
