"""Comparison of a recorded step with a simulation of the same schedule that uses the measured times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from math import inf
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.schedule import lists, megatron_order, recorded
from mindspeed_dsa.schedule.events import Costs, Event, Kind, Schedule, Unit
from mindspeed_dsa.schedule.report import Figures, figures
from mindspeed_dsa.schedule.simulate import Span, Timeline, simulate


class Difference(NamedTuple):
    """One event as recorded and as simulated. Starts are relative to the step's start; all in seconds."""

    rank: int
    event: Event
    recorded_start: float
    simulated_start: float
    recorded_duration: float
    simulated_duration: float


class Beside(NamedTuple):
    """A recorded and a simulated timeline, and their differences in event order and in times."""

    recorded: Timeline
    simulated: Timeline
    other_order: list[tuple[int, int]]
    """For each rank with another order: rank, and position of the first event that differs."""
    differences: list[Difference]
    """Differences of all events, sorted by the difference in duration, largest first."""

    def figures(self) -> list[Figures]:
        """Return the metrics of the recorded and of the simulated timeline."""
        return [figures(self.recorded, Costs()), figures(self.simulated, Costs())]

    def record(self) -> dict[str, Any]:
        """Return figures and differences as plain data for JSON; times are in seconds."""
        return {
            "figures": [row.record() for row in self.figures()],
            "other_order": self.other_order,
            "differences": [{**row._asdict(), "event": str(row.event)} for row in self.differences],
        }


def compare(folder: Path, megatron: Megatron) -> Beside:
    """Read a recorded step, and simulate it with the measured times of its events, messages and gaps.

    Raises:
        SettingsError: the files are missing or damaged.
    """
    layout, real = recorded.read(folder)
    simulated = simulate(schedule_of(layout, megatron), _costs(real))
    other = []
    for rank, (ours, theirs) in enumerate(zip(real.ranks, simulated.ranks, strict=True)):
        pairs = [(a.event == b.event) for a, b in zip(ours, theirs, strict=False)]
        if False in pairs or len(ours) != len(theirs):
            # The first difference, or the end of the shorter list.
            other.append((rank, pairs.index(False) if False in pairs else min(len(ours), len(theirs))))
    return Beside(real, simulated, other, _differences(real, simulated))


def schedule_of(layout: recorded.Layout, megatron: Megatron) -> Schedule:
    """Rebuild the schedule that a recorded step was configured to run."""
    if layout.v_shaped:
        return lists.dual_pipe_v(layout.ranks, layout.microbatches, layout.paired, layout.split)
    schedule = megatron_order.schedule(
        megatron,
        layout.ranks,
        layout.chunks,
        layout.microbatches,
        layout.group,
        paired=layout.paired,
        extra_warmup=layout.extra_warmup,
    )
    return lists.weights_later(schedule, layout.waiting) if layout.split else schedule


def _costs(timeline: Timeline) -> Costs:
    """Derive simulation costs from a recorded step."""
    messages, rests = [], []
    for start, free, sent in _starts(timeline):
        # The block waited for a message: it was sent after the rank became free.
        if sent > free and start >= sent:
            messages.append(start - sent)
    p2p = median(messages) if messages else 0.0
    for start, free, sent in _starts(timeline):
        # The message had arrived before the rank became free, so the gap is the host's.
        if free > -inf and sent + p2p <= free:
            rests.append(max(start - free, 0.0))
    return Costs(measured=_measured(timeline), p2p=p2p, between=fmean(rests) if rests else 0.0)


def _starts(timeline: Timeline) -> Iterator[tuple[float, float, float]]:
    """Yield a tuple per event or pair: its start, the previous one's end, and the sending of its input."""
    # -inf stands for a missing previous block or input.
    schedule = timeline.schedule
    ends: dict[Unit | None, tuple[int, float]] = {
        schedule.next_unit(rank, span.event): (rank, span.end)
        for rank, spans in enumerate(timeline.ranks)
        for span in spans
        if span.event.kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    for rank, spans in enumerate(timeline.ranks):
        free = -inf
        for start, block in groupby(spans, key=attrgetter("start")):
            sent = -inf
            for span in block:
                event = span.event
                unit = (event.kind, schedule.stage(rank, event.chunk), event.microbatch)
                sender, end = ends.get(unit, (rank, -inf))
                sent, last = max(sent, end if sender != rank else -inf), span.end
            yield start, free, sent
            free = last


def _measured(timeline: Timeline) -> dict[tuple[Kind, int], float]:
    """Return the median time per kind and stage. In a pair, each event counts half the pair's time."""
    durations: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for rank, spans in enumerate(timeline.ranks):
        split = {_key(span)[1:] for span in spans if span.event.kind is Kind.WEIGHT}
        some = {chunk for chunk, _ in split}
        for span in spans:
            kind, *unit = _key(span)
            # Skip whole backwards on a chunk with split ones: they also compute weight gradients.
            if kind is Kind.BACKWARD and span.event.chunk in some and tuple(unit) not in split:
                continue
            share = 1.0 if span.event.pair is None else 0.5
            stage = timeline.schedule.stage(rank, span.event.chunk)
            durations[span.event.kind, stage].append(share * (span.end - span.start))
    return {key: median(times) for key, times in durations.items()}


def _differences(real: Timeline, simulated: Timeline) -> list[Difference]:
    begin = min(span.start for spans in real.ranks for span in spans)
    differences = []
    for rank, spans in enumerate(simulated.ranks):
        by_event: dict[tuple[Kind, int, int], Span] = {_key(span): span for span in real.ranks[rank]}
        for span in spans:
            recorded_span = by_event.get(_key(span))
            if recorded_span is not None:
                differences.append(
                    Difference(
                        rank,
                        span.event,
                        recorded_span.start - begin,
                        span.start,
                        recorded_span.end - recorded_span.start,
                        span.end - span.start,
                    )
                )
    return sorted(differences, key=lambda d: -abs(d.recorded_duration - d.simulated_duration))


def _key(span: Span) -> tuple[Kind, int, int]:
    return span.event.kind, span.event.chunk, span.event.microbatch
