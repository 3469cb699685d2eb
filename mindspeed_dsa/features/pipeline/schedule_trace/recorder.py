"""Recorder of the start and end times of forwards and backwards in one step, measured on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.pipeline.schedule_trace.feature import Options
from mindspeed_dsa.megatron import pipeline_steps
from mindspeed_dsa.megatron.pipeline_chunks import is_v_shaped
from mindspeed_dsa.runs import files
from mindspeed_dsa.schedule import recorded
from mindspeed_dsa.schedule.events import Event
from mindspeed_dsa.schedule.simulate import Span


class Recorder(pipeline_steps.Follower):
    """Follower of the schedule that records one step."""

    def __init__(self, context: Context[Options]) -> None:
        super().__init__(context)
        # Counted in each world: ranks that join at an in-process restart have made no step.
        self._options, self._steps = context.options, WeakKeyDictionary[Any, int]()
        self._marks: list[tuple[Event, Any, Any]] = []
        self._start: Any = None
        self._origin: tuple[Any, float] = (None, 0.0)

    def begins(self, step: dict[str, Any]) -> bool:
        """Count the step; return whether it is to be recorded. If so, synchronize all ranks first."""
        world = dist.group.WORLD
        self._steps[world] = self._steps.get(world, 0) + 1
        if self._steps[world] != self._options.step:
            return False
        # Aligns the ranks; the device has no earlier work after the synchronization below.
        dist.barrier()
        platforms.current().synchronize()
        self._marks, self._origin = [], (_mark(), time.time())
        return True

    def before(self, events: Sequence[Event]) -> None:
        """Record the start of the events on the device."""
        self._start = _mark()

    def after(self, events: Sequence[Event]) -> None:
        """Record the end of the events on the device."""
        end = _mark()
        self._marks += [(event, self._start, end) for event in events]

    def ends(self, step: dict[str, Any]) -> None:
        """Write this rank's trace file."""
        folder = self._options.folder
        folder.mkdir(parents=True, exist_ok=True)
        text = recorded.text(self._layout(step), self._position(), self._options.step, self._spans())
        rank = dist.get_rank()
        files.write_atomically(folder / f"rank-{rank:05d}.json", text)

    def _spans(self) -> list[Span]:
        platforms.current().synchronize()
        first, origin = self._origin
        return [
            # elapsed_time is in ms, spans in seconds of the host's clock.
            Span(event, 0, origin + first.elapsed_time(start) / 1e3, origin + first.elapsed_time(end) / 1e3)
            for event, start, end in self._marks
        ]

    def _layout(self, step: dict[str, Any]) -> recorded.Layout:
        shape = self.shape(step)
        v_shaped = is_v_shaped(shape.config)
        return recorded.Layout(
            ranks=shape.ranks,
            chunks=len(shape.chunks),
            microbatches=shape.microbatches,
            group=shape.group,
            paired=shape.pairs,
            split=self._options.split,
            waiting=self._options.waiting,
            # DualPipeV pairs too, but its list has its own warmup.
            extra_warmup=shape.pairs and not v_shaped,
            v_shaped=v_shaped,
        )

    def _position(self) -> dict[str, int]:
        state = self.megatron("core.parallel_state")
        return {
            "pp": state.get_pipeline_model_parallel_rank(),
            "tp": state.get_tensor_model_parallel_rank(),
            "cp": state.get_context_parallel_rank(),
            "dp": state.get_data_parallel_rank(),
        }


def _mark() -> Any:
    """Record a timing event on the current device stream."""
    event = platforms.current().new_event(timing=True)
    event.record()
    return event
