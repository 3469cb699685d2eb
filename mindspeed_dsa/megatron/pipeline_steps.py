"""Callbacks for the steps, forwards and backwards of a pipeline schedule, with chunk and microbatch.

A feature subclasses :class:`Follower`, and its declaration has the patches of :func:`rows`. Features that
compute weight gradients apart from the backward report this with :func:`noted`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_dsa.feature import Context
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.schedule.events import Event, Kind

if TYPE_CHECKING:
    from typing_extensions import Self

_Function = Callable[..., Any]


class Shape(NamedTuple):
    """Shape of a pipeline schedule.

    Attributes:
        chunks: this rank's model chunks.
        config: configuration of the first chunk.
        ranks: number of pipeline ranks.
        rank: this rank's pipeline stage, from 0.
        microbatches: number of microbatches.
        group: number of microbatches that a chunk runs in a row.
        pairs: whether a forward and a backward run together.
    """

    chunks: list[Any]
    config: Any
    ranks: int
    rank: int
    microbatches: int
    group: int
    pairs: bool


class Follower:
    """Base class with callbacks for every forward and backward of a training step; one instance per session.

    Args:
        context: session's context of the feature.
    """

    def __init__(self, context: Context[Any]) -> None:
        self.megatron, self.following = context.megatron, False
        self._outputs: dict[int, tuple[Any, int, int]] = {}

    @classmethod
    def of(cls, context: Context[Any]) -> Self:
        """Return the session's follower, the state of the feature unless a subclass keeps it elsewhere."""
        return context.state(cls)

    def shape(self, step: dict[str, Any]) -> Shape:
        """Return the shape of a schedule that is called with these keyword arguments."""
        chunks = step["model"] if isinstance(step["model"], list) else [step["model"]]
        config = self.megatron("core.utils").get_model_config(chunks[0])
        state = self.megatron("core.parallel_state")
        ranks = state.get_pipeline_model_parallel_world_size()
        return Shape(
            chunks,
            config,
            ranks,
            state.get_pipeline_model_parallel_rank(),
            step["num_microbatches"],
            # Megatron's default is the number of ranks.
            getattr(config, "microbatch_group_size_per_vp_stage", None) or ranks,
            bool(getattr(config, "overlap_moe_expert_parallel_comm", False)),
        )

    def begins(self, step: dict[str, Any]) -> bool:
        """Called when a training step begins; returns whether to follow it.

        Args:
            step: keyword arguments of the schedule.
        """
        return True

    def ends(self, step: dict[str, Any]) -> None:
        """Called when a training step ends for which :meth:`begins` returned True."""

    def before(self, events: Sequence[Event]) -> None:
        """Called before a forward, a backward, a combined pair, or a computation of deferred gradients."""

    def during(self, forward: Event) -> AbstractContextManager[Any]:
        """Return a context to enter around a forward, or around a combined forward and backward."""
        return contextlib.nullcontext()

    def after(self, events: Sequence[Event]) -> None:
        """Called when the host has launched the kernels of ``events``, which may still be running."""

    def run(self, schedule: _Function, args: Any, step: dict[str, Any]) -> Any:
        """Call a pipeline schedule. If it trains, call :meth:`begins` before and :meth:`ends` after it."""
        if step.get("forward_only", False) or not self.begins(step):
            return schedule(*args, **step)
        self.following = True
        # noted() reaches all followers of the running step.
        token = _followers.set((*_followers.get(), self))
        try:
            result = schedule(*args, **step)
            self.ends(step)
        finally:
            self.following = False
            _followers.reset(token)
            self._outputs.clear()
        return result

    def remember(self, output: Any, event: Event) -> None:
        """Record which forward event produced ``output``. Its backward is called with the same object."""
        for tensor in output if isinstance(output, (list, tuple)) else [output]:
            if tensor is not None:
                # The stored tensor keeps its id from being reused.
                self._outputs[id(tensor)] = (tensor, event.chunk, event.microbatch)

    def backward_of(self, output: Any, pair: int | None = None) -> Event:
        """Return the backward event for an output recorded by :meth:`remember`."""
        tensors = output if isinstance(output, (list, tuple)) else [output]
        _, chunk, microbatch = next(
            self._outputs.pop(id(tensor)) for tensor in tensors if id(tensor) in self._outputs
        )
        return Event(Kind.BACKWARD, chunk, microbatch, pair)

    @classmethod
    def wrap_steps(cls, original: _Function, context: Context[Any]) -> _Function:
        """Decorate ``get_forward_backward_func``: run the returned schedule through :meth:`run`."""
        follower = cls.of(context)

        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
            schedule = original(*args, **kwargs)

            def forward_backward(*inner: Any, **step: Any) -> Any:
                return follower.run(schedule, inner, step)

            return forward_backward

        return get_forward_backward_func

    @classmethod
    def wrap_forwards(cls, original: _Function, context: Context[Any]) -> _Function:
        """Decorate ``forward_step``: report forward events to the follower."""
        follower, parameters = cls.of(context), signature(original)

        def forward_step(*args: Any, **kwargs: Any) -> Any:
            if not follower.following:
                return original(*args, **kwargs)
            bound = parameters.bind(*args, **kwargs).arguments
            chunk = bound.get("vp_stage")
            if chunk is None:  # Megatron-core 0.12 keeps it in the global state
                state = follower.megatron("core.parallel_state")
                chunk = state.get_virtual_pipeline_model_parallel_rank()
            event = Event(Kind.FORWARD, chunk or 0, bound["current_microbatch"])
            follower.before([event])
            with follower.during(event):
                result = original(*args, **kwargs)
            follower.remember(result[0] if isinstance(result, tuple) else result, event)
            follower.after([event])
            return result

        return forward_step

    @classmethod
    def wrap_backwards(cls, original: _Function, context: Context[Any]) -> _Function:
        """Decorate ``backward_step``: report backward events to the follower."""
        follower = cls.of(context)

        def backward_step(*args: Any, **kwargs: Any) -> Any:
            if not follower.following:
                return original(*args, **kwargs)
            # backward_step(input_tensor, output_tensor, ...)
            event = follower.backward_of(kwargs["output_tensor"] if "output_tensor" in kwargs else args[1])
            follower.before([event])
            result = original(*args, **kwargs)
            follower.after([event])
            return result

        return backward_step

    @classmethod
    def wrap_pairs(cls, original: _Function, context: Context[Any]) -> _Function:
        """Decorate ``combined_forward_backward_step``: report its forward, backward or both."""
        follower, parameters, pairs = cls.of(context), signature(original), 0

        def combined_forward_backward_step(*args: Any, **kwargs: Any) -> Any:
            nonlocal pairs
            if not follower.following:
                return original(*args, **kwargs)
            bound = parameters.bind(*args, **kwargs).arguments
            events, pair = [], None
            if bound["f_model"] is not None and bound["b_model"] is not None:
                # The same number marks both halves of a pair.
                pair, pairs = pairs, pairs + 1
            if bound["f_model"] is not None:
                chunk = bound.get("f_model_chunk_id") or 0
                events.append(Event(Kind.FORWARD, chunk, bound["current_microbatch"], pair))
            if bound["b_model"] is not None:
                events.append(follower.backward_of(bound["b_output_tensor"], pair))
            follower.before(events)
            forward = bound["f_model"] is not None
            with follower.during(events[0]) if forward else contextlib.nullcontext():
                result = original(*args, **kwargs)
            if forward:
                follower.remember(result[0], events[0])
            follower.after(events)
            return result

        return combined_forward_backward_step


_followers: ContextVar[tuple[Follower, ...]] = ContextVar("followers of a step", default=())


@contextlib.contextmanager
def noted(event: Event) -> Iterator[None]:
    """Call all followers' ``before`` and ``after`` around a block of work outside of decorated functions."""
    for follower in _followers.get():
        follower.before([event])
    yield
    for follower in _followers.get():
        follower.after([event])


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def rows(
    follower: str, steps: str, forwards: str, backwards: str, pairs: str, versions: str = ">=0.14"
) -> tuple[Patch, ...]:
    """Return the patches that report a schedule's steps, forwards and backwards to a follower.

    Args:
        follower: feature's subclass of :class:`Follower`, ``"package.module:Class"``.
        steps: reason for the patch of ``get_forward_backward_func``.
        forwards: reason for the patch of ``forward_step``.
        backwards: reason for the patch of ``backward_step``.
        pairs: reason for the patch of ``combined_forward_backward_step``.
        versions: Megatron-core releases whose pairs are reported.
    """
    return (
        Patch(f"{_SCHEDULES}:get_forward_backward_func", "wrap", f"{follower}.wrap_steps", steps),
        Patch(f"{_SCHEDULES}:forward_step", "wrap", f"{follower}.wrap_forwards", forwards),
        Patch(
            f"{_SCHEDULES}:backward_step",
            "wrap",
            f"{follower}.wrap_backwards",
            backwards,
            params=("output_tensor",),
        ),
        Patch(
            "megatron.core.pipeline_parallel.combined_1f1b:combined_forward_backward_step",
            "wrap",
            f"{follower}.wrap_pairs",
            pairs,
            params=("f_model", "b_model", "b_output_tensor"),
            versions=versions,
        ),
    )
