"""A recorded step beside its simulation: the same order, with times that were measured."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from math import inf
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.schedule import lists, megatron_order, recorded, report
from mindspeed_dsa.schedule.events import Costs, Event, Kind, Schedule, Unit
from mindspeed_dsa.schedule.report import Figures, figures
from mindspeed_dsa.schedule.simulate import Span, Timeline, simulate


class Difference(NamedTuple):
    """One event, as it was recorded and as it was simulated, in seconds since the step began."""

    rank: int
    event: Event
    recorded_start: float
    simulated_start: float
    recorded_duration: float
    simulated_duration: float


class Beside(NamedTuple):
    """Both timelines, where their order differs, and where their times differ most."""

    recorded: Timeline
    simulated: Timeline
    other_order: list[tuple[int, int]]
    """Rank and position of the first event of a rank that is not the one that the schedule has there."""
    differences: list[Difference]
    """By how much the duration differs, largest first."""

    def figures(self) -> list[Figures]:
        """Compute the figures of both schedules."""
        return [figures(self.recorded, Costs()), figures(self.simulated, Costs())]


def compare(folder: Path, megatron: Megatron) -> Beside:
    """Read a recorded step and simulate it with the times that its events, messages and rests took.

    Raises:
        SettingsError: the files are missing or damaged.
    """
    layout, real = recorded.read(folder)
    simulated = simulate(schedule_of(layout, megatron), _costs(real))
    other = []
    for rank, (ours, theirs) in enumerate(zip(real.ranks, simulated.ranks, strict=True)):
        pairs = [(a.event == b.event) for a, b in zip(ours, theirs, strict=False)]
        if False in pairs or len(ours) != len(theirs):
            other.append((rank, pairs.index(False) if False in pairs else min(len(ours), len(theirs))))
    return Beside(real, simulated, other, _differences(real, simulated))


def schedule_of(layout: recorded.Layout, megatron: Megatron) -> Schedule:
    """Return the lists that a recorded step was to run."""
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
    """Return what a recorded step's simulation is to cost.

    That is the median time of each kind of event in each stage, the median time of a message that was waited
    for, and, where nothing was, the mean time from one event of a rank to the next.
    """
    messages, rests = [], []
    for start, free, sent in _starts(timeline):
        if sent > free and start >= sent:
            messages.append(start - sent)
    p2p = median(messages) if messages else 0.0
    for start, free, sent in _starts(timeline):
        if free > -inf and sent + p2p <= free:
            rests.append(max(start - free, 0.0))
    return Costs(measured=_measured(timeline), p2p=p2p, between=fmean(rests) if rests else 0.0)


def _starts(timeline: Timeline) -> Iterator[tuple[float, float, float]]:
    """Yield of each block its start, the end of the rank's block before, and of what it gets from others.

    What there is not has ended long ago.
    """
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
    """Half of a pair's time counts for each of the two; of backwards those count that are split, if any."""
    durations: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for rank, spans in enumerate(timeline.ranks):
        split = {_key(span)[1:] for span in spans if span.event.kind is Kind.WEIGHT}
        some = {chunk for chunk, _ in split}
        for span in spans:
            kind, *unit = _key(span)
            if kind is Kind.BACKWARD and span.event.chunk in some and tuple(unit) not in split:
                continue
            share = 1.0 if span.event.pair is None else 0.5
            stage = timeline.schedule.stage(rank, span.event.chunk)
            durations[span.event.kind, stage].append(share * (span.end - span.start))
    return {key: median(times) for key, times in durations.items()}


def _differences(real: Timeline, simulated: Timeline) -> list[Difference]:
    begin = min(span.start for spans in real.ranks for span in spans)
    found = []
    for rank, spans in enumerate(simulated.ranks):
        by_event: dict[tuple[Kind, int, int], Span] = {_key(span): span for span in real.ranks[rank]}
        for span in spans:
            own = by_event.get(_key(span))
            if own is not None:
                found.append(
                    Difference(
                        rank,
                        span.event,
                        own.start - begin,
                        span.start,
                        own.end - own.start,
                        span.end - span.start,
                    )
                )
    return sorted(found, key=lambda d: -abs(d.recorded_duration - d.simulated_duration))


def _key(span: Span) -> tuple[Kind, int, int]:
    return span.event.kind, span.event.chunk, span.event.microbatch


def write(found: Beside, png: str | None, perfetto: str | None, to_json: str | None) -> None:
    """Write what was asked for; times are seconds."""
    timelines = [found.recorded, found.simulated]
    if png:
        report.png(timelines, Path(png), "s")
    if perfetto:
        report.perfetto(timelines, Path(perfetto), 1e6)
    if to_json:
        record = {
            "figures": [each.record() for each in found.figures()],
            "other_order": found.other_order,
            "differences": [{**each._asdict(), "event": str(each.event)} for each in found.differences],
        }
        Path(to_json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
