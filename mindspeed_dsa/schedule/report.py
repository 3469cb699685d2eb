"""Metrics and plots of a timeline: step time, bubbles, hidden communication, activation memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.schedule.events import Costs, Kind
from mindspeed_dsa.schedule.simulate import Span, Timeline


@dataclass(frozen=True)
class Figures:
    """Metrics of one schedule.

    Attributes:
        schedule: name of the schedule.
        step_time: time of the step, in the unit of the costs.
        bubble_fraction: idle time of all ranks divided by ``ranks * step_time``.
        hidden: fraction of the total all-to-all time that is hidden by computation.
        steady_hidden_mean: hidden fraction of the all-to-all time in pairs, mean over the ranks.
        steady_hidden_worst: hidden fraction of the all-to-all time in pairs, on the rank where it is lowest.
        chunks_in_flight: peak number of forwards whose backward has not run yet, per rank.
        peak_memory: peak activation memory, per rank.
    """

    schedule: str
    step_time: float
    bubble_fraction: float
    hidden: float | None
    steady_hidden_mean: float | None
    steady_hidden_worst: float | None
    chunks_in_flight: tuple[int, ...]
    peak_memory: tuple[float, ...]

    def record(self) -> dict[str, Any]:
        """Return the metrics as a dict for JSON."""
        return asdict(self)


def figures(timeline: Timeline, costs: Costs) -> Figures:
    """Compute the metrics of a timeline."""
    by_rank = [_hidden([s for s in spans if s.event.pair is not None]) for spans in timeline.ranks]
    steady = [share for share in by_rank if share is not None]
    busy = sum(_busy(spans) for spans in timeline.ranks)
    return Figures(
        schedule=timeline.schedule.name,
        step_time=timeline.step_time,
        bubble_fraction=1 - busy / (len(timeline.ranks) * timeline.step_time),
        hidden=_hidden([span for spans in timeline.ranks for span in spans]),
        steady_hidden_mean=sum(steady) / len(steady) if steady else None,
        steady_hidden_worst=min(steady) if steady else None,
        chunks_in_flight=tuple(_in_flight(spans) for spans in timeline.ranks),
        peak_memory=tuple(_peak_memory(spans, costs) for spans in timeline.ranks),
    )


def _hidden(spans: Sequence[Span]) -> float | None:
    communication = sum(span.communication for span in spans)
    return sum(span.hidden for span in spans) / communication if communication else None


def _busy(spans: Sequence[Span]) -> float:
    """Return a rank's working time; the two events of a pair count once."""
    return sum(end - start for start, end in {(span.start, span.end) for span in spans})


def _in_flight(spans: Sequence[Span]) -> int:
    now = peak = 0
    for span in spans:
        now += (span.event.kind is Kind.FORWARD) - (span.event.kind is Kind.BACKWARD)
        peak = max(peak, now)
    return peak


def _peak_memory(spans: Sequence[Span], costs: Costs) -> float:
    """Return the peak activation memory; it depends only on the order of the events."""
    units = {(span.event.kind, span.event.chunk, span.event.microbatch) for span in spans}
    now = peak = 0.0
    for span in spans:
        event = span.event
        recomputed = (Kind.RECOMPUTE, event.chunk, event.microbatch) in units
        split = (Kind.WEIGHT, event.chunk, event.microbatch) in units
        # Share of the activations that the deferred weight gradients keep after the backward.
        late = costs.weight_activations * costs.activations if split else 0.0
        kept = costs.checkpoint if recomputed else costs.activations
        if event.kind is Kind.FORWARD:
            # A checkpointed forward holds one layer's activations at a time; the checkpoint cost has them.
            now += kept
        elif event.kind is Kind.RECOMPUTE:
            now += costs.activations
        elif event.kind is Kind.BACKWARD:
            peak = max(peak, now)
            now -= costs.activations - late + (costs.checkpoint if recomputed else 0.0)
        else:
            now -= late
        peak = max(peak, now)
    return peak


def table(rows: Sequence[Figures]) -> list[tuple[str, ...]]:
    """Format metrics as rows of a text table, the header first."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    head = ("schedule", "step", "bubble", "hidden", "steady", "worst rank", "in flight", "peak memory")
    return [
        head,
        *(
            (
                row.schedule,
                f"{row.step_time:g}",
                share(row.bubble_fraction),
                share(row.hidden),
                share(row.steady_hidden_mean),
                share(row.steady_hidden_worst),
                str(max(row.chunks_in_flight)),
                f"{max(row.peak_memory):g}",
            )
            for row in rows
        ),
    ]


_LOOKS = {
    Kind.FORWARD: ("forward", "#7fb2e5", "#2f6fae"),
    Kind.BACKWARD: ("backward", "#8fd19e", "#2e8b4a"),
    Kind.WEIGHT: ("weight gradients", "#f2d16b", "#f2d16b"),
    Kind.RECOMPUTE: ("recompute", "#c9a3d9", "#c9a3d9"),
    Kind.DISPATCH: ("dispatch", "#d9d9d9", "#a6a6a6"),
    Kind.COLD: ("experts of dispatched tokens", "#7fb2e5", "#2f6fae"),
    Kind.HOT: ("moved experts", "#f0997d", "#c0542f"),
    Kind.PASSED: ("moved weights and gradients", "#f2d16b", "#c99a1a"),
    Kind.COMBINE: ("combine", "#ececec", "#c4c4c4"),
}
"""Label, colour of the first chunks (lighter), and colour of the last chunks (darker)."""
_LABELLED = 700
"""Largest number of spans that get their microbatch as a label."""


def png(timelines: Sequence[Timeline], path: Path, unit: str = "") -> None:
    """Plot timelines one below the other, with one row per rank and a shared time axis.

    Raises:
        SettingsError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingsError(
            "a picture of a schedule needs matplotlib: pip install 'mindspeed_dsa[viz]'"
        ) from error
    rows = sum(len(timeline.ranks) for timeline in timelines)
    # At most 40 inches: a layer of 256 ranks has thin rows.
    height = min(1.0 * len(timelines) + max(0.3 * rows, 1.5), 40.0)
    figure = Figure(figsize=(16, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        len(timelines), 1, sharex=True, squeeze=False, height_ratios=[len(t.ranks) for t in timelines]
    )[:, 0]
    for axes, timeline in zip(panels, timelines, strict=True):
        _panel(axes, timeline)
    panels[-1].set_xlabel(f"time{f' [{unit}]' if unit else ''}")
    figure.savefig(path, dpi=110)


def _panel(axes: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    origin = min(span.start for spans in timeline.ranks for span in spans)
    labelled = sum(map(len, timeline.ranks)) <= _LABELLED and timeline.schedule.microbatches > 1
    chunks = timeline.schedule.chunks
    for rank, spans in enumerate(timeline.ranks):
        for span in spans:
            bottom, height = _lane(span, rank)
            is_late = chunks > 1 and span.event.chunk >= chunks / 2
            start, width = span.start - origin, span.end - span.start
            axes.broken_barh(
                [(start, width)],
                (bottom, height),
                facecolors=_LOOKS[span.event.kind][2 if is_late else 1],
                edgecolor="white",
                linewidth=0.4 if sum(map(len, timeline.ranks)) <= _LABELLED else 0.0,
            )
            if labelled:
                text = str(span.event.microbatch)
                axes.text(start + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=6)
    axes.set_ylim(len(timeline.ranks), 0)
    axes.margins(x=0.005)
    shown = range(0, len(timeline.ranks), max(1, len(timeline.ranks) // 32))
    axes.set_yticks([rank + 0.5 for rank in shown], list(shown))
    axes.set_ylabel("rank")
    axes.set_title(f"{timeline.schedule.name}: {timeline.step_time:.6g}", loc="left", fontsize=10)
    kinds = dict.fromkeys(span.event.kind for spans in timeline.ranks for span in spans)
    axes.legend(
        handles=[Patch(color=_LOOKS[kind][1], label=_LOOKS[kind][0]) for kind in kinds],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=7,
        ncols=len(kinds),
    )


def _lane(span: Span, rank: int) -> tuple[float, float]:
    """Return a span's vertical position and height in the plot; the events of a pair share a row."""
    if span.event.pair is None:
        return rank + 0.05, 0.9
    return (rank + 0.5, 0.45) if _below(span) else (rank + 0.05, 0.45)


def _below(span: Span) -> bool:
    """Return whether a span is the second of those that share a row."""
    return span.event.pair is not None and span.event.kind in (Kind.BACKWARD, Kind.PASSED)


def perfetto(timelines: Sequence[Timeline], path: Path, microseconds: float = 1000.0) -> None:
    """Write a trace in the Chrome format, with one process per timeline and one thread per rank.

    Args:
        timelines: timelines to write.
        path: path of the ``.json`` file.
        microseconds: length of one time unit of the timelines, in microseconds.
    """
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        events.append(_name("process_name", timeline.schedule.name, process))
        origin = min(span.start for spans in timeline.ranks for span in spans)
        for rank, spans in enumerate(timeline.ranks):
            # A pair's events overlap in time, so its backward gets a lane of its own.
            below = {span.event.kind for span in spans if _below(span)}
            passed = Kind.PASSED in below
            lanes = (f"rank {rank}", f"rank {rank}, {'links' if passed else 'paired backward'}")
            paired = any(span.event.pair is not None for span in spans)
            events += [
                _name("thread_name", name, process, 2 * rank + lane)
                for lane, name in enumerate(lanes[: 1 + paired])
            ]
            events += [
                {
                    "ph": "X",
                    "name": str(span.event),
                    "cat": _LOOKS[span.event.kind][0],
                    "pid": process,
                    "tid": 2 * rank + _below(span),
                    # Chrome traces count in microseconds.
                    "ts": (span.start - origin) * microseconds,
                    "dur": (span.end - span.start) * microseconds,
                    "args": {
                        "chunk": span.event.chunk,
                        "microbatch": span.event.microbatch,
                        "all-to-all": span.communication,
                        "hidden": span.hidden,
                    },
                }
                for span in spans
            ]
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def _name(kind: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
