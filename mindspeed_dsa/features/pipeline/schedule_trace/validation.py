"""What a recorded schedule needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_dsa.features.pipeline.schedule_trace.options import Options


def trace_wanted(settings: Any) -> bool:
    """Whether a folder is named, or a step, which is refused without one."""
    return settings.trace_schedule is not None or settings.trace_schedule_step is not None


def check_trace(args: Any) -> list[str]:
    """A step that the run reaches, and a folder that can be one."""
    return list(_problems(args))


def _problems(args: Any) -> Iterator[str]:
    step, last = Options.of(args).step, getattr(args, "train_iters", None)
    if step < 1:
        yield f"--trace-schedule-step is {step}; steps of a run are counted from 1"
    elif last is not None and step > last:
        yield f"--trace-schedule-step {step} is never reached: --train-iters is {last}"
    folder = Path(args.trace_schedule)
    if folder.exists() and not folder.is_dir():
        yield f"--trace-schedule {folder} is a file; name a folder"
