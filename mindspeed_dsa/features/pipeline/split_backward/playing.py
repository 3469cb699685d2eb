"""Player that computes deferred weight gradients at their positions in the schedule's list."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.pipeline.split_backward.feature import Options
from mindspeed_dsa.features.pipeline.waiting_gradients import Unit, WaitingGradients
from mindspeed_dsa.megatron import pipeline_steps
from mindspeed_dsa.parallel.weight_gradients import queued_as_now
from mindspeed_dsa.schedule import lists, megatron_order
from mindspeed_dsa.schedule.events import Event, Kind

_Function = Callable[..., Any]
_MIB = 1 << 20


class Player(pipeline_steps.Follower):
    """Follower that computes the weight gradients listed after each backward. Megatron runs the other events.

    Weight gradients are computed right after the backward's input gradient is sent, before any wait. If
    nothing is sent, they are computed immediately.

    Attributes:
        waiting: deferred weight gradients of the running step, or ``None`` outside a step.
        most: peak number of backwards with deferred weight gradients in the last step, and peak bytes of
            their operands.
    """

    def __init__(self, context: Context[Options]) -> None:
        super().__init__(context)
        self._most, self._log = context.options.waiting, context.log
        self.waiting: WaitingGradients | None = None
        self.most = (0, 0)
        self._after: dict[Unit, list[Unit]] = {}
        self._due: deque[Unit] = deque()
        self._is_first = self._sent = False

    def begins(self, step: dict[str, Any]) -> bool:
        """Build this rank's list of events."""
        shape = self.shape(step)
        whole = megatron_order.schedule(
            self.megatron,
            shape.ranks,
            len(shape.chunks),
            shape.microbatches,
            shape.group,
            paired=shape.pairs,
            # Paired schedules run one more warmup forward.
            extra_warmup=shape.pairs,
        )
        self._after = _after_backwards(lists.weights_later(whole, self._most).ranks[shape.rank])
        self._is_first = shape.rank == 0
        self.waiting = WaitingGradients(shape.chunks, shape.microbatches, self.megatron)
        return True

    def run(self, schedule: _Function, args: Any, step: dict[str, Any]) -> Any:
        """Run the schedule, with gradient reduction postponed until all weight gradients are computed."""

        def reduced_later(*inner: Any, **keywords: Any) -> Any:
            if not self.following or self.waiting is None:
                return schedule(*inner, **keywords)
            with self.waiting.step():
                return schedule(*inner, **keywords)

        try:
            return super().run(reduced_later, args, step)
        finally:
            self.waiting = None
            self._due.clear()

    def ends(self, step: dict[str, Any]) -> None:
        """Log once how many weight gradients were deferred at a time."""
        if self.waiting is None:
            return
        self.most = (self.waiting.most_units, self.waiting.most_bytes)
        self._log.info(
            "at most %d weight gradients waited, with %.1f MiB of operands",
            self.most[0],
            self.most[1] / _MIB,
            once=True,
            ranks="stage",
        )

    def before(self, events: Sequence[Event]) -> None:
        """Compute weight gradients still due from earlier backwards, before ``events`` start."""
        # WEIGHT events are noted by play() itself.
        if events[0].kind is not Kind.WEIGHT:
            self.play()
            self._sent = False

    def during(self, forward: Event) -> AbstractContextManager[Any]:
        """Return a context that defers the weight gradients of a forward."""
        if self.waiting is None:
            return nullcontext()
        return self.waiting.deferring(forward.chunk, forward.microbatch)

    def after(self, events: Sequence[Event]) -> None:
        """Mark the weight gradients after this backward as due. Compute them now if nothing is sent."""
        event = next((event for event in events if event.kind is Kind.BACKWARD), None)
        if event is None or self.waiting is None:
            return
        self.waiting.ran_backward(event.chunk)
        self._due += self._after[event.chunk, event.microbatch]
        # The first stage sends no input gradient. In a pair, the send may precede the end of the pair.
        if self._sent or (self._is_first and event.chunk == 0):
            self.play()

    def sent(self) -> None:
        """Compute due weight gradients while an input gradient is in transfer."""
        self._sent = True
        self.play()

    def play(self) -> None:
        """Compute all due weight gradients."""
        while self._due and self.waiting is not None:
            self.waiting.run(*self._due.popleft())


def _after_backwards(events: Sequence[Event]) -> dict[Unit, list[Unit]]:
    """Return a dict from each backward in a rank's list to the weight gradients that follow it."""
    after: dict[Unit, list[Unit]] = defaultdict(list)
    last: Unit = (0, 0)
    for event in events:
        unit = (event.chunk, event.microbatch)
        if event.kind is Kind.WEIGHT:
            after[last].append(unit)
        elif event.kind is Kind.BACKWARD:
            last = unit
    return after


def compute_while_sending(original: _Function, context: Context[Options]) -> _Function:
    """Wrap ``_p2p_ops`` and ``_batched_p2p_ops``: compute due weight gradients after a gradient is sent."""
    player = context.state(Player)

    def p2p_ops(*, tensor_send_prev: Any, **kwargs: Any) -> Any:
        works = original(tensor_send_prev=tensor_send_prev, **kwargs)
        if tensor_send_prev is not None and player.following:
            player.sent()
        return works

    return p2p_ops


def defer_in_recomputation(original: _Function) -> _Function:
    """Wrap ``tensor_parallel.random.checkpoint``: defer weight gradients of recomputed layers too."""

    def checkpoint(function: _Function, *args: Any) -> Any:
        return original(queued_as_now(function), *args)

    return checkpoint


def defer_where_outputs_are_discarded(original: _Function) -> _Function:
    """Wrap ``CheckpointWithoutOutput.checkpoint``: defer weight gradients of recomputed layers too."""

    def checkpoint(self: Any, run_function: _Function, *args: Any) -> Any:
        return original(self, queued_as_now(run_function), *args)

    return checkpoint
