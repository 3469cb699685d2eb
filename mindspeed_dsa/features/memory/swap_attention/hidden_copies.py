"""How much each layer swaps under ``--swap-attention auto``: what comes and goes behind computation.

In the first step everything is swapped, and host memory is pinned. In the second one everything is swapped
once more, and events on the device's streams tell when each storage was saved, copied, asked back and read.
From the third step on a layer swaps as many of its storages, in the order in which they are saved, as would
have made nobody wait. Ranks decide apart: a swap has no collectives, and the numbers are the same bits either
way.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
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
"""Share of the device's memory that is left free."""
_MEASURED_STEP = 2


@dataclass(frozen=True)
class Times:
    """One storage of a layer's forward, in seconds.

    Attributes:
        nbytes: of it.
        saved: when it was saved, since the layer's first one was.
        out: that its copy to the host took.
        back: that its copy back took.
        read: when backward first read it, since it was asked back; without the time that the device had
            waited for other copies until then. Infinite where it was on the device all the time.
    """

    nbytes: int
    saved: float
    out: float
    back: float
    read: float


def hidden(storages: Sequence[Times], end: float) -> int:
    """Return how many of the first storages of a layer are swapped without anybody waiting.

    Copies to the host run one after another and have until the layer's end. Backward reads what was saved
    last first, and copies come back in that order.

    Args:
        storages: in the order in which they are saved.
        end: of the layer's forward, in seconds since its first save.
    """
    for count in range(len(storages), 0, -1):
        first = storages[:count]
        gone = back = 0.0
        for each in first:
            gone = max(gone, each.saved) + MARGIN * each.out
        in_time = gone <= end
        for each in reversed(first):
            back += MARGIN * each.back
            in_time = in_time and back <= each.read
        if in_time:
            return count
    return 0


class Clock:
    """Events of one forward of a layer and its backward."""

    def __init__(self) -> None:
        self.end: Event | None = None
        self.asked: Event | None = None
        self.saved: list[Event] = []
        self.copies: list[Copies] = []
        self.denied: list[int] = []
        """Bytes of storages that ``--swap-attention-bytes`` has kept on the device."""
        self.above: Clock | None = None
        """Clock of the layer above, whose backward asks for this one's storages."""

    def save(self, copies: Copies) -> None:
        """Note that a storage has been saved, and its copy to the host begun."""
        self.saved.append(now())
        self.copies.append(copies)

    def times(self) -> tuple[list[Times], float] | None:
        """Return the storages' times and the end of the layer; None where a part of it never happened."""
        if not self.saved or self.end is None or self.asked is None:
            return None
        asked, stalls = self.asked, self.above.stalls() if self.above is not None else 0.0
        read = [math.inf if each.read is None else _seconds(asked, each.read) for each in self.copies]
        computed = dict.fromkeys(range(len(read)), math.inf)
        for number in sorted(range(len(read)), key=read.__getitem__):
            computed[number] = max(read[number] - stalls, 0.0)
            stalls += self.copies[number].stall()
        found = [
            Times(
                each.nbytes,
                _seconds(self.saved[0], saved),
                _lasts(each.out),
                _lasts(each.back),
                computed[number],
            )
            for number, (each, saved) in enumerate(zip(self.copies, self.saved, strict=True))
        ]
        return found, _seconds(self.saved[0], self.end)

    def stalls(self) -> float:
        """Return the seconds that the device has waited for copies back in this layer's backward."""
        return sum(each.stall() for each in self.copies)


@dataclass
class Copies:
    """Events of one storage.

    Attributes:
        nbytes: of it.
        out, back: begin and end of its copies, on their streams; ``back`` only where it had left the device.
        read: when backward needed it, on the computing stream, before that waited.
    """

    nbytes: int
    out: tuple[Event, Event] | None = None
    back: tuple[Event, Event] | None = None
    read: Event | None = None

    def stall(self) -> float:
        """Return the seconds that the device has waited for the copy back."""
        if self.back is None or self.read is None:
            return 0.0
        return max(0.0, _seconds(self.read, self.back[1]))


def now(stream: Any = None) -> Event:
    """Return an event at what a stream, or the current one, has been given so far."""
    platform = platforms.current()
    event = platform.new_event(timing=True)
    event.record(platform.current_stream() if stream is None else stream)
    return event


def _lasts(copy: tuple[Event, Event] | None) -> float:
    return 0.0 if copy is None else _seconds(*copy)


def _seconds(begin: Any, end: Any) -> float:
    return float(begin.elapsed_time(end)) / 1e3


@dataclass
class OfLayer:
    """Knowledge of a layer's passes.

    Attributes:
        name: of the layer, for messages.
        clocks: of the passes of the measured step.
        open: passes whose graph is alive.
        most: of them at one time.
        limit: storages that a pass swaps; None: all.
        nbytes: of the storages that a pass could swap, in their order.
    """

    name: str
    clocks: list[Clock] = field(default_factory=list)
    open: int = 0
    most: int = 0
    limit: int | None = None
    nbytes: list[int] = field(default_factory=list)

    def decide(self, asynchronous: bool) -> None:
        """Set the limit by the passes that were measured whole; None where there are none.

        Args:
            asynchronous: copies run beside computation; if not, each is waited for.
        """
        clocks, self.clocks = self.clocks, []
        whole = [each.times() for each in clocks if not each.denied]
        counts = [hidden(*times) if asynchronous else 0 for times in whole if times is not None]
        self.limit = min(counts) if counts else None
        sizes = [[*(copies.nbytes for copies in each.copies), *each.denied] for each in clocks]
        self.nbytes = max(sizes, key=sum, default=[])

    def stays(self) -> int:
        """Return the bytes on the device that the limit leaves there, of all open passes."""
        return self.most * sum(self.nbytes[self.limit :]) if self.limit is not None else 0


class Choice(pipeline_steps.Follower):
    """The session's layers, and the step that is running."""

    def __init__(self, context: Context[Options]) -> None:
        super().__init__(context.megatron)
        self._measures, self._log = context.options.measures, context.log
        self._layers: WeakKeyDictionary[Any, OfLayer] = WeakKeyDictionary()
        self._most_bytes = context.options.most_bytes
        self._on_host = 0
        self._step = 0

    def begins(self, step: dict[str, Any]) -> bool:
        """Count steps; decide when the measured one is over."""
        self._step += 1
        if self._measures and self._step == _MEASURED_STEP + 1:
            self._decide()
        return False

    def starts(self, layer: Any, layer_pass: Any) -> tuple[int | None, Clock | None]:
        """Note a pass of a layer: return how many storages it may swap, and its clock if it is measured."""
        if not self._measures:
            return None, None
        known = self._layers.setdefault(layer, OfLayer(f"layer {layer.layer_number}"))
        if self._step != _MEASURED_STEP:
            return known.limit, None
        clock = Clock()
        known.clocks.append(clock)
        known.open += 1
        known.most = max(known.most, known.open)
        weakref.finalize(layer_pass, _closed, known)
        return None, clock

    def may_take(self, nbytes: int) -> bool:
        """Return whether so many bytes more may be on the host."""
        return self._most_bytes is None or self._on_host + size_class(nbytes) <= self._most_bytes

    def takes(self, swapped: Any) -> None:
        """Count a storage's buffer until it is gone."""
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
        known = [layer.limit for layer in layers if layer.limit is not None]
        for layer in layers:
            if layer.limit is None:  # the bound left no whole pass of it to measure
                layer.limit = min(known, default=0)
        beyond = keep_within(layers, _room(platform))
        swapped = sum(sum(layer.nbytes[: layer.limit]) for layer in layers)
        reason = f"as the copies and the computation of step {_MEASURED_STEP} allow"
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
    """Return the bytes that the device can certainly hold beyond the peak of the steps so far."""
    memory = platform.memory()
    # Beside what the allocator counts there are contexts, communication buffers and other processes.
    return float(min(memory.total * (1 - _SPARE) - memory.peak, memory.free))


def keep_within(layers: Sequence[OfLayer], room: float) -> int:
    """Let layers swap all again, until what stays on the device fits; return how many do.

    Args:
        layers: with their limits, which are changed; those that free most go first.
        room: bytes.
    """
    beyond = 0
    for layer in sorted(layers, key=OfLayer.stays, reverse=True):
        if sum(each.stays() for each in layers) <= room:
            break
        layer.limit, beyond = None, beyond + 1
    return beyond


def follow_steps(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``get_forward_backward_func``."""
    return pipeline_steps.follow_steps(original, context.state(Choice))
