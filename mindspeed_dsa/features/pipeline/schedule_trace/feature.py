"""Feature that records the times of forwards and backwards on every pipeline rank in one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.features.pipeline.split_backward.feature import detaches_gradients, splits_backward
from mindspeed_dsa.megatron import pipeline_steps
from mindspeed_dsa.megatron.configuration import check_trains
from mindspeed_dsa.megatron.graphs import REST, refuse_graphs
from mindspeed_dsa.patches.errors import SettingsError

STEP = 3
"""Default step. Earlier steps allocate memory and run one-time measurements of features."""


@dataclass(frozen=True)
class Options:
    """Options of the schedule trace.

    Attributes:
        folder: folder for the trace files.
        step: training step to record, from 1.
        split: whether weight gradients are computed separately.
        waiting: bound on the number of deferred weight gradients, or ``None``.
    """

    folder: Path
    step: int
    split: bool = False
    waiting: int | None = None

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings.

        Raises:
            SettingsError: a step is given without a folder.
        """
        folder, step = settings.trace_schedule, settings.trace_schedule_step
        if folder is None:
            raise SettingsError(
                f"--trace-schedule-step {step} records nothing without --trace-schedule; name a folder with "
                "that, or omit it"
            )
        return cls(
            folder=Path(folder),
            step=STEP if step is None else step,
            split=splits_backward(settings) or detaches_gradients(settings),
            waiting=getattr(settings, "split_backward_waiting", None),
        )


def trace_wanted(settings: Any) -> bool:
    """Return whether a folder or a step is set. A step without a folder is an error."""
    return settings.trace_schedule is not None or settings.trace_schedule_step is not None


def check_trace(args: Any, options: Any) -> Iterator[str]:
    """Report a step beyond the end of the run, and a folder that is a file."""
    step, last = Options.of(args).step, getattr(args, "train_iters", None)
    if step < 1:
        yield f"--trace-schedule-step is {step}; steps of a run are counted from 1"
    elif last is not None and step > last:
        yield f"--trace-schedule-step {step} is never reached: --train-iters is {last}"
    yield from check_trains(args, "--trace-schedule")
    yield from refuse_graphs(args, "--trace-schedule", "a replay calls no part of the schedule", {REST})
    folder = Path(args.trace_schedule)
    if folder.exists() and not folder.is_dir():
        yield f"--trace-schedule {folder} is a file; name a folder"


_RECORDER = "mindspeed_dsa.features.pipeline.schedule_trace.recorder"

FEATURE = Feature(
    name="schedule-trace",
    summary="Records the timeline of one training step on every rank, as the schedule simulator reads it.",
    flags=(
        Flag(
            "--trace-schedule",
            "Write the timeline of one training step to DIR, one file per rank; "
            "`python -m mindspeed_dsa schedule --beside DIR` reads it.",
            kind="value",
            metavar="DIR",
        ),
        Flag(
            "--trace-schedule-step",
            "The step that is recorded, counted from 1 in this run; default: 3.",
            kind="value",
            type=int,
            metavar="N",
        ),
    ),
    patches=(
        *pipeline_steps.rows(
            f"{_RECORDER}:Recorder",
            "records where a step of the schedule begins and ends",
            "records one forward of a chunk, without its waits for other ranks",
            "records one backward of a chunk",
            "records a forward and a backward that share a block",
        ),
    ),
    active=trace_wanted,
    options=Options.of,
    check=check_trace,
    doc="schedule-trace.md",
)
