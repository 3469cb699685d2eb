"""Files of a recorded step, one per rank, which training writes and the comparison reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.schedule.events import Event, Kind, Schedule
from mindspeed_dsa.schedule.simulate import Span, Timeline

FORMAT = 1


@dataclass(frozen=True)
class Layout:
    """Parameters of the recorded schedule.

    Attributes:
        ranks: pipeline parallel size.
        chunks: virtual pipeline size.
        microbatches: number of microbatches of the step.
        group: microbatch group size.
        paired: whether forwards and backwards ran in pairs.
        extra_warmup: whether there was one more warmup forward.
        split: whether weight gradients were computed separately.
        waiting: bound on deferred weight gradients per rank. ``None``: only the schedule's own bound.
        v_shaped: whether the schedule was DualPipeV.
    """

    ranks: int
    chunks: int
    microbatches: int
    group: int
    paired: bool
    extra_warmup: bool
    split: bool = False
    waiting: int | None = None
    v_shaped: bool = False


def text(layout: Layout, position: Mapping[str, int], step: int, spans: list[Span]) -> str:
    """Return the content of a rank's file, as JSON.

    Args:
        layout: layout of the schedule.
        position: dict from parallel dimension, such as ``pp``, to this rank's index.
        step: number of the step in the run.
        spans: spans in the order of their starts; times in seconds.
    """
    rows = [
        [s.event.kind.value, s.event.chunk, s.event.microbatch, s.event.pair, s.start, s.end] for s in spans
    ]
    return json.dumps(
        {"format": FORMAT, "step": step, "layout": vars(layout), "position": dict(position), "spans": rows}
    )


def read(folder: Path) -> tuple[Layout, Timeline]:
    """Read a recorded step, only the ranks with index 0 in all parallel dimensions except ``pp``.

    Raises:
        SettingsError: files are missing, damaged, or come from different runs.
    """
    files = sorted(folder.glob("rank-*.json")) if folder.is_dir() else []
    if not files:
        raise SettingsError(f"{folder} has no recorded step; train with --trace-schedule {folder}")
    by_rank: dict[int, Any] = {}
    for file in files:
        data = _load(file)
        if all(rank == 0 for name, rank in data["position"].items() if name != "pp"):
            by_rank[data["position"]["pp"]] = data
    # All files must have the same step and layout.
    layouts = {json.dumps([data["step"], data["layout"]], sort_keys=True) for data in by_rank.values()}
    if len(layouts) != 1:
        raise SettingsError(f"{folder} holds files of different runs; remove them and record again")
    layout = Layout(**next(iter(by_rank.values()))["layout"])
    missing = [rank for rank in range(layout.ranks) if rank not in by_rank]
    if missing:
        raise SettingsError(
            f"{folder} lacks the file of pipeline rank {missing[0]}; copy all ranks' files there"
        )
    spans = [[_span(rank, row) for row in by_rank[rank]["spans"]] for rank in range(layout.ranks)]
    schedule = Schedule(
        "recorded",
        tuple(tuple(span.event for span in rank_spans) for rank_spans in spans),
        layout.chunks,
        layout.microbatches,
        layout.v_shaped,
    )
    return layout, Timeline(schedule, tuple(map(tuple, spans)))


def _load(file: Path) -> Any:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}")
        Layout(**data["layout"])
        [_span(0, row) for row in data["spans"]]
        int(data["position"]["pp"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{file} is not a recorded step ({error}); record it again") from None
    return data


def _span(rank: int, row: list[Any]) -> Span:
    kind, chunk, microbatch, pair, start, end = row
    return Span(Event(Kind(kind), chunk, microbatch, pair), rank, float(start), float(end))
