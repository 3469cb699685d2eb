"""Pictures of timelines: a PNG, and a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.schedule.events import Kind
from mindspeed_dsa.schedule.simulate import Span, Timeline

_COLOURS = {
    Kind.FORWARD: ("#7fb2e5", "#2f6fae"),
    Kind.BACKWARD: ("#8fd19e", "#2e8b4a"),
    Kind.WEIGHT: ("#f2d16b", "#f2d16b"),
    Kind.RECOMPUTE: ("#c9a3d9", "#c9a3d9"),
}
"""First chunks lighter, last chunks darker."""
_LABELS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.WEIGHT: "weight gradients",
    Kind.RECOMPUTE: "recompute",
}
_LABELLED = 700
"""More spans than this are drawn without their microbatch."""


def png(timelines: Sequence[Timeline], path: Path, unit: str = "") -> None:
    """Draw timelines below each other, one row per rank, with one scale of time.

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
    figure = Figure(figsize=(16, 1.0 * len(timelines) + max(0.3 * rows, 1.5)), layout="constrained")
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
    labelled = sum(map(len, timeline.ranks)) <= _LABELLED
    chunks = timeline.schedule.chunks
    for rank, spans in enumerate(timeline.ranks):
        for span in spans:
            bottom, height = _lane(span, rank)
            shade = int(chunks > 1 and span.event.chunk >= chunks / 2)
            start, width = span.start - origin, span.end - span.start
            axes.broken_barh(
                [(start, width)],
                (bottom, height),
                facecolors=_COLOURS[span.event.kind][shade],
                edgecolor="white",
                linewidth=0.4 if labelled else 0.0,
            )
            if labelled:
                text = str(span.event.microbatch)
                axes.text(start + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=6)
    axes.set_ylim(len(timeline.ranks), 0)
    axes.margins(x=0.005)
    axes.set_yticks([rank + 0.5 for rank in range(len(timeline.ranks))], range(len(timeline.ranks)))
    axes.set_ylabel("rank")
    axes.set_title(f"{timeline.schedule.name}: {timeline.step_time:.6g}", loc="left", fontsize=10)
    kinds = dict.fromkeys(span.event.kind for spans in timeline.ranks for span in spans)
    axes.legend(
        handles=[Patch(color=_COLOURS[kind][0], label=_LABELS[kind]) for kind in kinds],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=7,
        ncols=len(kinds),
    )


def _lane(span: Span, rank: int) -> tuple[float, float]:
    """Top and height of a span: the two of a pair share a row."""
    if span.event.pair is None:
        return rank + 0.05, 0.9
    return (rank + 0.05, 0.45) if span.event.kind is Kind.FORWARD else (rank + 0.5, 0.45)


def perfetto(timelines: Sequence[Timeline], path: Path, microseconds: float = 1000.0) -> None:
    """Write a trace in the Chrome format, one process per timeline and one thread per rank.

    Args:
        timelines: what to write.
        path: of the file, ``.json``.
        microseconds: of one unit of time.
    """
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        events.append(_name("process_name", timeline.schedule.name, process))
        origin = min(span.start for spans in timeline.ranks for span in spans)
        for rank, spans in enumerate(timeline.ranks):
            lanes = (f"rank {rank}", f"rank {rank}, paired backward")
            paired = any(span.event.pair is not None for span in spans)
            events += [
                _name("thread_name", name, process, 2 * rank + lane)
                for lane, name in enumerate(lanes[: 1 + paired])
            ]
            events += [
                {
                    "ph": "X",
                    "name": str(span.event),
                    "cat": _LABELS[span.event.kind],
                    "pid": process,
                    "tid": 2 * rank + (span.event.pair is not None and span.event.kind is Kind.BACKWARD),
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
