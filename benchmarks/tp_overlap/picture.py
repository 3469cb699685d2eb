"""Recorded step as a file for chrome://tracing or ui.perfetto.dev, and as an image."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tp_overlap.trace import Span

_LANES = ("matmul", "transfer 1", "transfer 2")
_COLOURS = {
    "matmul": "#4878a8",
    "all-gather": "#e08a3c",
    "reduce-scatter": "#c05050",
    "all-reduce": "#7a5ea8",
    "experts": "#4878a8",
    "shared expert": "#58a070",
    "weight gradients": "#90b8d8",
    "all-to-all": "#e08a3c",
}
Recorded = Sequence[Mapping[str, Sequence[Span]]]


def write(recorded: Recorded, path: Path, of: str) -> None:
    """Write ``path`` and, next to it, the image with the suffix ``.png``.

    Args:
        recorded: spans by variant, for each rank.
        path: file for the trace.
        of: name of the recorded computation.
    """
    path.write_text(json.dumps({"traceEvents": events(recorded)}) + "\n", encoding="utf-8")
    _draw(recorded, path.with_suffix(".png"), of)


def events(recorded: Recorded) -> list[dict[str, Any]]:
    """Return Chrome's trace events: a process per variant and rank, a thread per lane, microseconds."""
    trace_events: list[dict[str, Any]] = []
    for number, name in enumerate(recorded[0]):
        origin = _origin(recorded, name)
        for rank, ways in enumerate(recorded):
            process = number * len(recorded) + rank
            trace_events.append(_name("process_name", process, 0, f"{name}, rank {rank}"))
            trace_events += [_name("thread_name", process, lane, text) for lane, text in enumerate(_LANES)]
            trace_events += [
                {
                    "name": span.name,
                    "ph": "X",
                    "pid": process,
                    "tid": _LANES.index(span.lane),
                    "ts": round(1e6 * (span.start - origin), 1),
                    "dur": round(1e6 * (span.end - span.start), 1),
                }
                for span in ways[name]
            ]
    return trace_events


def _name(kind: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}}


def _origin(recorded: Recorded, name: str) -> float:
    return min(span.start for ways in recorded for span in ways[name])


def _draw(recorded: Recorded, path: Path, of: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    names = list(recorded[0])
    figure, axes = pyplot.subplots(len(names), 1, figsize=(10, 4), sharex=True, squeeze=False)
    used: dict[str, str] = {}
    for axis, name in zip(axes[:, 0], names, strict=True):
        origin = _origin(recorded, name)
        spans = recorded[0][name]
        for span in spans:
            used[span.name] = _COLOURS.get(span.name, "#888888")
            start, length = 1e3 * (span.start - origin), 1e3 * (span.end - span.start)
            bar = {"facecolors": used[span.name], "edgecolor": "white", "linewidth": 0.4}
            axis.broken_barh([(start, length)], (-_LANES.index(span.lane) - 0.4, 0.8), **bar)
        total = 1e3 * (max(span.end for span in spans) - origin)
        axis.set_yticks([-lane for lane in range(len(_LANES))], _LANES)
        axis.set_title(f"{name}: {total:.0f} ms", loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel(f"ms, forward and backward of {of}, rank 0")
    legend = [Patch(color=colour, label=text) for text, colour in used.items()]
    figure.legend(handles=legend, ncols=len(legend), loc="upper right", frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
