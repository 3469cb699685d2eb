"""Early recomputation: a rank recomputes checkpointed segments before it waits for their gradient.

The order of recomputation is fixed by the schedule, and does not depend on whether a gradient has arrived.
The ranks of a tensor, context or expert parallel group must run their collectives in the same order, but
gradients arrive at different times on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch.autograd.function import once_differentiable

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.pipeline.recomputation import RunsAgain, as_in_forward
from mindspeed_dsa.features.pipeline.recompute_ahead.feature import Options
from mindspeed_dsa.megatron import gathered_weights, pipeline_steps
from mindspeed_dsa.megatron.frozen_inputs import checkpoint_learning
from mindspeed_dsa.schedule import megatron_order
from mindspeed_dsa.schedule.events import Event, Kind

_Function = Callable[..., Any]
Unit = tuple[int, int]
"""Chunk and microbatch."""


class Ahead(pipeline_steps.Follower):
    """Follower of the schedule that records each forward's segments until their backward."""

    def __init__(self, context: Context[Options]) -> None:
        super().__init__(context)
        self.everywhere, self._log = context.options.everywhere, context.log
        self.unit: Unit | None = None
        """Chunk and microbatch of the running forward."""
        self.segments: dict[Unit, list[Any]] = {}
        self.layers: dict[Unit, list[tuple[RunsAgain, Any]]] = {}
        """Recomputed layers per unit in a paired schedule, with a reference to Megatron's layer."""
        self.pairs = False
        self._order: list[Unit] = []
        self._done, self._warmup = 0, 0
        self.recomputed = {"ahead": 0, "in place": 0}
        """Number of segments recomputed in the last step, early or in their own backward."""

    def begins(self, step: dict[str, Any]) -> bool:
        """Compute the order of backwards in the schedule."""
        shape = self.shape(step)
        layout = (self.megatron, shape.ranks, len(shape.chunks), shape.microbatches, shape.group)
        self._order = megatron_order.backward_order(*layout)
        self.pairs = shape.pairs
        # Paired schedules run one more warmup forward.
        self._warmup = megatron_order.warmup_of(
            *layout[:2], shape.rank, *layout[2:], extra_warmup=shape.pairs
        )
        self._done, self.segments, self.layers, self.unit = 0, {}, {}, None
        self.recomputed = {"ahead": 0, "in place": 0}
        return True

    def ends(self, step: dict[str, Any]) -> None:
        """Log once how many segments were recomputed early."""
        self._log.info(
            "%d segments were recomputed while a gradient was on its way, %d in their backward",
            *self.recomputed.values(),
            once=True,
            ranks="stage",
        )

    def before(self, events: Sequence[Event]) -> None:
        """Start recording a forward's segments. Drop a backward's segments, which its graph keeps alive."""
        for event in events:
            unit = (event.chunk, event.microbatch)
            if event.kind is Kind.FORWARD:
                self.unit = unit
                self.segments[unit], self.layers[unit] = [], []
            elif event.kind is Kind.BACKWARD and not self.pairs:
                for segment in self.segments.pop(unit):
                    self.recomputed["in place" if segment.outputs is None else "ahead"] += 1
                self._done += 1

    def after(self, events: Sequence[Event]) -> None:
        """Stop recording. Count a pair's backward here, because it waits for its gradient inside the pair."""
        self.unit = None
        for event in events:
            if self.pairs and event.kind is Kind.BACKWARD:
                self.recomputed["in place"] += len(self.layers.pop((event.chunk, event.microbatch)))
                self._done += 1

    def recompute(self) -> None:
        """Recompute the segments of the next backward, in reverse order of their forward."""
        if not self.following or self._done >= len(self._order):
            return
        index, unit = self._done, self._order[self._done]
        # 1F1B on 4 ranks: rank 0 has 3 warmup forwards, so it waits for the first gradient and the last 3.
        if self.everywhere or megatron_order.in_bubble(index, len(self._order), self._warmup):
            for segment in reversed(self.segments.get(unit, [])):
                if segment.outputs is None and _has_inputs(segment):
                    recompute_segment(segment, self.megatron, self._on_chunk(unit[0]))
            # Emptied here, so that after() counts only layers recomputed in place.
            layers, self.layers[unit] = self.layers.get(unit, []), []
            for layer, module in reversed(layers):
                with gathered_weights.there([module]):
                    layer.recompute_before()
                    layer.recompute_experts()
            self.recomputed["ahead"] += len(layers)

    def _on_chunk(self, chunk: int) -> _Function:
        """Return a wrapper that runs a function with Megatron 0.12's global chunk index set to ``chunk``."""
        state = self.megatron("core.parallel_state")
        current = state.get_virtual_pipeline_model_parallel_rank()
        if current is None:
            return lambda run: run()

        def run_there(run: _Function) -> Any:
            state.set_virtual_pipeline_model_parallel_rank(chunk)
            try:
                return run()
            finally:
                state.set_virtual_pipeline_model_parallel_rank(current)

        return run_there


def collect_layers(original: _Function, context: Context[Options]) -> _Function:
    """Wrap ``TransformerLayerSchedulePlan._build_callable_nodes``: record layers that are recomputed."""
    ahead = context.state(Ahead)

    def _build_callable_nodes(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        pieces = getattr(self, "pieces", None)
        if ahead.unit is not None and isinstance(pieces, RunsAgain):
            ahead.layers[ahead.unit].append((pieces, ref(self.layer)))

    return _build_callable_nodes


def checkpoint_ahead(original: _Function, context: Context[Options]) -> _Function:
    """Wrap ``tensor_parallel.random.checkpoint``: record a segment that can be recomputed early."""
    ahead = context.state(Ahead)

    def checkpoint(function: _Function, distribute_saved_activations: bool, *args: Any) -> Any:
        return checkpoint_learning(segment, function, distribute_saved_activations, *args)

    def segment(function: _Function, distribute_saved_activations: bool, *args: Any) -> Any:
        # Nested checkpoints run as usual: inside a segment gradients are off, and in recomputation no
        # forward is running.
        has_backward = torch.is_grad_enabled() and any(each.requires_grad for each in _tensors(args))
        if ahead.unit is None or ahead.pairs or distribute_saved_activations or not has_backward:
            return original(function, distribute_saved_activations, *args)
        random = context.megatron("core.tensor_parallel.random")
        return _Segment.apply(ahead.segments[ahead.unit], random, function, *args)

    return checkpoint


class _Segment(torch.autograd.Function):
    """Megatron's checkpoint function, whose outputs can be recomputed before its backward."""

    @staticmethod
    def forward(ctx: Any, segments: list[Any], random: Any, function: _Function, *args: Any) -> Any:
        ctx.random, ctx.outputs, ctx.inputs = random, None, None
        # Modules with sharded weights, to be gathered for the recomputation.
        ctx.modules = gathered_weights.running()
        segments.append(ctx)
        return random.CheckpointFunction.forward(ctx, function, False, *args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.outputs is None:
            # CheckpointFunction has one input less: function, distribute_saved_activations, args.
            return (None, *ctx.random.CheckpointFunction.backward(ctx, *grads))
        outputs, inputs = ctx.outputs, ctx.inputs
        ctx.outputs = ctx.inputs = None
        learning = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if torch.is_tensor(output) and output.requires_grad
        ]
        torch.autograd.backward([output for output, _ in learning], [grad for _, grad in learning])
        gradients = (each.grad if torch.is_tensor(each) else None for each in inputs)
        # No gradients for segments, random and function.
        return (None, None, None, *gradients)


def _has_inputs(ctx: Any) -> bool:
    """Return whether the memory of all saved inputs is allocated."""
    # An input that is itself recomputed, such as a norm's output, is freed until its gradient arrives. The
    # result is the same on all ranks, as it does not depend on time.
    return all(each.numel() == 0 or each.untyped_storage().nbytes() for each in _tensors(ctx.saved_tensors))


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [each for each in values if torch.is_tensor(each)]


def recompute_segment(ctx: Any, megatron: Megatron, run_there: _Function) -> None:
    """Run a segment's forward again and store its outputs with their graph."""
    with as_in_forward(megatron, ctx.rng_states), gathered_weights.there(ctx.modules):
        ctx.inputs = ctx.random.detach_variable(ctx.saved_tensors)
        outputs = run_there(lambda: ctx.run_function(*ctx.inputs))
    ctx.outputs = (outputs,) if torch.is_tensor(outputs) else outputs


class _Wait:
    """Handle of a transfer; calls a function before it waits."""

    def __init__(self, work: Any, before: Callable[[], None]) -> None:
        self._work, self._before = work, before

    def wait(self, *args: Any) -> Any:
        """Call the function, then wait."""
        self._before()
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        """Forward all other attributes to the wrapped handle."""
        return getattr(self._work, name)


def recompute_before_waiting(original: _Function, context: Context[Options]) -> _Function:
    """Wrap ``_p2p_ops`` and ``_batched_p2p_ops``: recompute before waiting for a gradient."""
    ahead = context.state(Ahead)

    def p2p_ops(*, tensor_recv_next: Any, **kwargs: Any) -> Any:
        works = original(tensor_recv_next=tensor_recv_next, **kwargs)
        if tensor_recv_next is None or not ahead.following:
            return works
        if isinstance(works, dict):
            return {**works, "recv_next": _Wait(works["recv_next"], ahead.recompute)}
        # Batched: any handle may be the receive's. A second recompute() finds nothing left to do.
        return [_Wait(work, ahead.recompute) for work in works]

    return p2p_ops
