"""Pipeline schedules missing in Megatron: zero bubble and DualPipeV, as lists of events per rank.

Sources: ZB-H1 of "Zero Bubble Pipeline Parallelism" (Qi et al., 2023). DualPipeV is the DualPipe of the
DeepSeek-V3 report cut in half: each rank has two stages, and no stage is stored twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.schedule.events import Event, Kind, Schedule


def zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """Return ZB-H1: 1F1B where rank r defers r weight gradients to fill its cooldown bubble.

    Args:
        ranks: pipeline parallel size.
        microbatches: number of microbatches per step.
    """
    lists = tuple(tuple(_one_f_one_b(ranks - rank - 1, microbatches)) for rank in range(ranks))
    return replace(weights_later(Schedule("", lists, 1, microbatches)), name="zero bubble (ZB-H1)")


def _one_f_one_b(warmup: int, microbatches: int) -> Iterator[Event]:
    for step in range(microbatches + warmup):
        if step < microbatches:
            yield Event(Kind.FORWARD, 0, step)
        if step >= warmup:
            yield Event(Kind.BACKWARD, 0, step - warmup)


def weights_later(schedule: Schedule, most: int | None = None) -> Schedule:
    """Split weight gradients off a schedule's backwards, to compute them later in the same order.

    Rank r defers r weight gradients, exactly enough to fill its cooldown bubble.

    Args:
        schedule: schedule whose backwards include weight gradients.
        most: largest number of weight gradients that a rank may defer at a time, each of one chunk and
            microbatch.
    """
    lists = (
        tuple(_weights_later(events, rank if most is None else min(rank, most)))
        for rank, events in enumerate(schedule.ranks)
    )
    return replace(schedule, name=f"{schedule.name}, split", ranks=tuple(lists))


def _weights_later(events: Iterable[Event], waiting: int) -> Iterator[Event]:
    left: deque[Event] = deque()
    for event in events:
        yield event
        if event.kind is Kind.BACKWARD:
            left.append(Event(Kind.WEIGHT, event.chunk, event.microbatch))
            if len(left) > waiting:
                yield left.popleft()
    yield from left


@lru_cache(maxsize=4)  # every step asks for the same list
def dual_pipe_v(ranks: int, microbatches: int, paired: bool = True, split: bool = False) -> Schedule:
    """Return DualPipeV: two chunks per rank, and forwards of one chunk paired with backwards of the other.

    Args:
        ranks: pipeline parallel size.
        microbatches: number of microbatches per step, at least twice the ranks.
        paired: whether a forward of one chunk and a backward of the other run together as a pair.
        split: whether to defer the weight gradients that would delay another rank, to fill the cooldown. The
            others are computed right after their input gradients, or together with them in a pair.

    Raises:
        SettingsError: there are too few microbatches.
    """
    if microbatches < 2 * ranks:
        raise SettingsError(
            f"DualPipeV needs at least {2 * ranks} microbatches on {ranks} pipeline ranks, not {microbatches}"
        )
    ranks_events = [_DualPipeV(ranks, rank, microbatches, split).events() for rank in range(ranks)]
    lists = tuple(tuple(events if paired else _unpaired(tuple(events), split)) for events in ranks_events)
    name = "DualPipeV" + ", split backward" * split
    return Schedule(name, lists, 2, microbatches, v_shaped=True)


def _unpaired(events: Sequence[Event], split: bool) -> Iterator[Event]:
    """Yield a rank's events without pairs; ``split`` separates the weight gradients of every backward."""
    later = {(event.chunk, event.microbatch) for event in events if event.kind is Kind.WEIGHT}
    for event in events:
        yield replace(event, pair=None)
        if split and event.kind is Kind.BACKWARD and (event.chunk, event.microbatch) not in later:
            yield Event(Kind.WEIGHT, event.chunk, event.microbatch)


@lru_cache(maxsize=4)
def dual_pipe_v_forwards(ranks: int, microbatches: int) -> Schedule:
    """Return an evaluation schedule (forwards only) on DualPipeV's chunks; no bubbles after warmup.

    Args:
        ranks: pipeline parallel size.
        microbatches: number of microbatches; any number works.
    """
    lists = []
    for rank in range(ranks):
        # If all forwards take time 1, stage s has microbatch m at time s + 2 m. A rank has one even and one
        # odd stage (rank 0 of 4: stages 0 and 7), so the two never collide.
        units = sorted(
            (stage + 2 * microbatch, chunk, microbatch)
            for chunk, stage in enumerate((rank, 2 * ranks - 1 - rank))
            for microbatch in range(microbatches)
        )
        lists.append(tuple(Event(Kind.FORWARD, chunk, microbatch) for _, chunk, microbatch in units))
    return Schedule("DualPipeV, forwards", tuple(lists), 2, microbatches, v_shaped=True)


class _DualPipeV:
    """Generator of one rank's events, in the eight phases of DualPipeV."""

    def __init__(self, ranks: int, rank: int, microbatches: int, split: bool) -> None:
        self.ranks, self.rank, self.microbatches, self.splits = ranks, rank, microbatches, split
        self.done = {(kind, chunk): 0 for kind in Kind for chunk in (0, 1)}
        self.pending: deque[tuple[int, int]] = deque()  # (chunk, microbatch) without weight gradients
        self.pairs = 0

    def events(self) -> Iterator[Event]:
        ahead = self.ranks - self.rank - 1
        # 1: forwards of chunk 0.
        for _ in range(2 * ahead):
            yield self._forward(0)
        # 2: forwards of both chunks.
        for _ in range(self.rank + 1):
            yield self._forward(0)
            yield self._forward(1)
        for _ in range(ahead):
            # 3: B1 W F1. Other ranks wait for B1, so its weight gradients are split off.
            yield self._backward(1, split=True)
            yield from self._weight()
            yield self._forward(1)
        # 4: the steady state, F0 with B1 and F1 with B0.
        for index in range(self.microbatches - 2 * self.ranks + self.rank + 1):
            if index == 0 and self.rank == self.ranks - 1:
                # Not a pair, as in DeepSeek's DualPipeV: two separate events leave a smaller bubble.
                yield self._forward(0)
                yield self._backward(1)
            else:
                yield from self._pair(0, 1)
            yield from self._pair(1, 0)
        # 5: B1, then F1 with B0.
        for _ in range(ahead):
            yield self._backward(1)
            yield from self._pair(1, 0)
        # 6: B1 B0; the second half of these backwards is split.
        split = False
        for index in range(self.rank + 1):
            half = index == (self.rank + 1) // 2
            split = split or (half and self.rank % 2 == 1)
            yield self._backward(1, split)
            split = split or (half and self.rank % 2 == 0)
            yield self._backward(0, split)
        # 7: W B0, the weight gradients fill the waits for gradients.
        for _ in range(ahead):
            yield from self._weight()
            yield self._backward(0, split=True)
        # 8: the remaining weight gradients.
        while self.pending:
            yield from self._weight()

    def _next(self, kind: Kind, chunk: int) -> int:
        self.done[kind, chunk] += 1
        return self.done[kind, chunk] - 1

    def _forward(self, chunk: int, pair: int | None = None) -> Event:
        return Event(Kind.FORWARD, chunk, self._next(Kind.FORWARD, chunk), pair)

    def _backward(self, chunk: int, split: bool = False, pair: int | None = None) -> Event:
        microbatch = self._next(Kind.BACKWARD, chunk)
        if split and self.splits:
            self.pending.append((chunk, microbatch))
        return Event(Kind.BACKWARD, chunk, microbatch, pair)

    def _pair(self, forward: int, backward: int) -> Iterator[Event]:
        pair, self.pairs = self.pairs, self.pairs + 1
        yield self._forward(forward, pair)
        yield self._backward(backward, pair=pair)

    def _weight(self) -> Iterator[Event]:
        if self.pending:
            yield Event(Kind.WEIGHT, *self.pending.popleft())
