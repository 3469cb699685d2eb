"""Starts and ends of forwards and backwards of one step, as the device saw them."""

from __future__ import annotations

import time
from collections.abc import Callable
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from mindspeed_dsa import platforms
from mindspeed_dsa.context import Context
from mindspeed_dsa.features.pipeline.schedule_trace.options import Options
from mindspeed_dsa.runs import files
from mindspeed_dsa.schedule import recorded
from mindspeed_dsa.schedule.events import Event, Kind
from mindspeed_dsa.schedule.simulate import Span

Unit = tuple[int, int]
"""Chunk and microbatch."""


class _Recorder:
    """State of one session: how many steps were made, and the one that is being recorded."""

    def __init__(self, context: Context[Options]) -> None:
        self.context, self.steps, self.recording = context, 0, False
        self.marks: list[tuple[Event, Any, Any]] = []
        self.units: dict[int, tuple[Any, Unit]] = {}
        self.pairs = 0
        self.origin: tuple[Any, float] = (None, 0.0)

    def begin(self) -> None:
        """Start to record; all ranks stand at the same point in time, as far as a barrier says."""
        self.recording, self.marks, self.units, self.pairs = True, [], {}, 0
        if dist.is_initialized():
            dist.barrier()
        platforms.current().synchronize()
        self.origin = (self.mark(), time.time())

    def mark(self) -> Any:
        """A point in the device's order of work."""
        event = platforms.current().new_event(timing=True)
        event.record()
        return event

    def add(self, event: Event, start: Any, end: Any) -> None:
        """One event between two marks."""
        self.marks.append((event, start, end))

    def remember(self, output: Any, unit: Unit) -> None:
        """Which forward an output is of: its backward is called with the very same object."""
        for tensor in output if isinstance(output, (list, tuple)) else [output]:
            if tensor is not None:
                self.units[id(tensor)] = (tensor, unit)

    def unit_of(self, output: Any) -> Unit:
        """Of a backward."""
        tensors = output if isinstance(output, (list, tuple)) else [output]
        return next(self.units.pop(id(tensor))[1] for tensor in tensors if id(tensor) in self.units)

    def spans(self) -> list[Span]:
        """What was recorded, in seconds of the first rank's clock."""
        platforms.current().synchronize()
        first, origin = self.origin
        return [
            Span(event, 0, origin + first.elapsed_time(start) / 1e3, origin + first.elapsed_time(end) / 1e3)
            for event, start, end in self.marks
        ]


_recorders: WeakKeyDictionary[Context[Options], _Recorder] = WeakKeyDictionary()


def _recorder(context: Context[Options]) -> _Recorder:
    if context not in _recorders:
        _recorders[context] = _Recorder(context)
    return _recorders[context]


def record_step(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``get_forward_backward_func``: what it returns records the chosen training step."""
    recorder = _recorder(context)

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        schedule = original(*args, **kwargs)

        def forward_backward(*inner: Any, **named: Any) -> Any:
            if named.get("forward_only", False):
                return schedule(*inner, **named)
            recorder.steps += 1
            if recorder.steps != context.options.step:
                return schedule(*inner, **named)
            recorder.begin()
            try:
                result = schedule(*inner, **named)
                _write(recorder, named)
            finally:
                recorder.recording = False
            return result

        return forward_backward

    return get_forward_backward_func


def record_forward(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``forward_step``."""
    recorder = _recorder(context)

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        if not recorder.recording:
            return original(*args, **kwargs)
        start = recorder.mark()
        result = original(*args, **kwargs)
        unit = _unit_of_forward(context, original, args, kwargs)
        output = result[0] if isinstance(result, tuple) else result
        recorder.remember(output, unit)
        recorder.add(Event(Kind.FORWARD, *unit), start, recorder.mark())
        return result

    return forward_step


def record_backward(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``backward_step``."""
    recorder = _recorder(context)

    def backward_step(*args: Any, **kwargs: Any) -> Any:
        if not recorder.recording:
            return original(*args, **kwargs)
        output = kwargs["output_tensor"] if "output_tensor" in kwargs else args[1]
        start, unit = recorder.mark(), recorder.unit_of(output)
        result = original(*args, **kwargs)
        recorder.add(Event(Kind.BACKWARD, *unit), start, recorder.mark())
        return result

    return backward_step


def record_pair(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``combined_forward_backward_step``, of which either half may be missing."""
    recorder = _recorder(context)
    parameters = signature(original)

    def combined_forward_backward_step(*args: Any, **kwargs: Any) -> Any:
        if not recorder.recording:
            return original(*args, **kwargs)
        given = parameters.bind(*args, **kwargs).arguments
        backward = recorder.unit_of(given["b_output_tensor"]) if given["b_model"] is not None else None
        start = recorder.mark()
        result = original(*args, **kwargs)
        end, pair = recorder.mark(), None
        if given["f_model"] is not None:
            unit = (given.get("f_model_chunk_id") or 0, given["current_microbatch"])
            recorder.remember(result[0], unit)
            if backward is not None:
                pair, recorder.pairs = recorder.pairs, recorder.pairs + 1
            recorder.add(Event(Kind.FORWARD, *unit, pair), start, end)
        if backward is not None:
            recorder.add(Event(Kind.BACKWARD, *backward, pair), start, end)
        return result

    return combined_forward_backward_step


def _unit_of_forward(context: Context[Options], original: Callable[..., Any], args: Any, kwargs: Any) -> Unit:
    given = signature(original).bind(*args, **kwargs).arguments
    chunk = given.get("vp_stage")
    if chunk is None:  # Megatron-core 0.12 keeps it in its global state
        chunk = context.megatron("core.parallel_state").get_virtual_pipeline_model_parallel_rank()
    return chunk or 0, given["current_microbatch"]


def _write(recorder: _Recorder, named: dict[str, Any]) -> None:
    state = recorder.context.megatron("core.parallel_state")
    model = named["model"]
    chunks = model if isinstance(model, list) else [model]
    config = recorder.context.megatron("core.utils").get_model_config(chunks[0])
    extra = bool(getattr(config, "overlap_moe_expert_parallel_comm", False))
    ranks = state.get_pipeline_model_parallel_world_size()
    layout = recorded.Layout(
        ranks=ranks,
        chunks=len(chunks),
        microbatches=named["num_microbatches"],
        group=getattr(config, "microbatch_group_size_per_vp_stage", None) or ranks,
        paired=recorder.pairs > 0,
        extra_warmup=extra,
    )
    position = {
        "pp": state.get_pipeline_model_parallel_rank(),
        "tp": state.get_tensor_model_parallel_rank(),
        "cp": state.get_context_parallel_rank(),
        "dp": state.get_data_parallel_rank(),
    }
    folder = recorder.context.options.folder
    folder.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    written = recorded.text(layout, position, recorder.steps, recorder.spans())
    files.write_atomically(folder / f"rank-{rank:05d}.json", written)
