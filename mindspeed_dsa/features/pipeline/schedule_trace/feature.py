"""Recording of what every pipeline rank really did in one step, and when."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.features.pipeline.schedule_trace.options import Options
from mindspeed_dsa.features.pipeline.schedule_trace.validation import check_trace, trace_wanted
from mindspeed_dsa.patches.spec import Patch

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
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
        Patch(
            f"{_SCHEDULES}:get_forward_backward_func",
            "wrap",
            f"{_RECORDER}:record_steps",
            "a step of the schedule begins and ends here",
        ),
        Patch(
            f"{_SCHEDULES}:forward_step",
            "wrap",
            f"{_RECORDER}:record_forwards",
            "one forward of a chunk, without its waits for other ranks",
        ),
        Patch(
            f"{_SCHEDULES}:backward_step",
            "wrap",
            f"{_RECORDER}:record_backwards",
            "one backward of a chunk",
            params=("output_tensor",),
        ),
        Patch(
            "megatron.core.pipeline_parallel.combined_1f1b:combined_forward_backward_step",
            "wrap",
            f"{_RECORDER}:record_pairs",
            "a forward and a backward that share a block",
            params=("f_model", "b_model", "b_output_tensor"),
            versions=">=0.14",
        ),
    ),
    active=trace_wanted,
    options=Options.of,
    validate=check_trace,
    doc="schedule-trace.md",
)
