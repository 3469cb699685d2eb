"""Forward of an MoE layer, reordered so that the dispatch and combine all-to-alls are hidden.

Autograd runs nodes in reverse order of their creation (see ``parallel/all_to_all.py``). The order of forward
is therefore

    start dispatch, deferred gradients of the experts, shared fc1 and activation, wait for dispatch,
    experts, start combine, shared fc2 and gate, wait for combine

In backward, the experts' weight gradients hide the reverse dispatch, and the shared fc2 hides the reverse
combine. The weight gradients are long enough to hide the dispatch. So the backward of the shared fc1, which
is ready early too, also runs during the reverse combine (:meth:`InFlight.give_way`). Without deferred weight
gradients, as with Transformer Engine's experts, the shared fc1 hides the dispatch instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.alltoall_overlap.feature import check_overlap
from mindspeed_dsa.megatron.shared_expert import SharedOutput, before_second_half, shared_expert_of
from mindspeed_dsa.parallel.all_to_all import InFlight, launching
from mindspeed_dsa.parallel.names import named
from mindspeed_dsa.parallel.weight_gradients import defer_gradients

Routed = Callable[[], "tuple[Any, ...]"]


class Call:
    """State of one forward of one MoE layer.

    Attributes:
        shared: shared expert that has not run yet, or ``None``.
        dispatch, combine: transfers in flight.
    """

    def __init__(self, shared: SharedOutput | None = None) -> None:
        self.shared = shared
        self.dispatch: list[InFlight] = []
        self.combine: list[InFlight] = []

    def arrived(self) -> Iterator[Tensor]:
        """Yield the dispatched tokens and probabilities, after waiting for each."""
        return (flight.wait() for flight in self.dispatch)


def calls_of(context: Context[None]) -> WeakKeyDictionary[Any, Call]:
    """Create the session's dict from dispatcher to running :class:`Call`. The last wait removes an entry."""
    return WeakKeyDictionary()


def postpone_shared_experts(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Wrap ``MoELayer.shared_experts_compute``, the layer's first step: run the shared expert later."""
    calls = context.state(calls_of)

    def shared_experts_compute(self: Any, hidden_states: Tensor) -> Any:
        if not is_served(self, context):
            return original(self, hidden_states)
        shared = SharedOutput(partial(original, self, hidden_states)) if self.use_shared_expert else None
        calls[self.token_dispatcher] = Call(shared)
        return shared

    return shared_experts_compute


def expect_transfers(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Wrap ``MoELayer.dispatch``: create the :class:`Call` if there is no ``shared_experts_compute``."""
    calls = context.state(calls_of)

    def dispatch(self: Any, hidden_states: Tensor, probs: Tensor) -> Any:
        if is_served(self, context):
            calls[self.token_dispatcher] = Call()
        return original(self, hidden_states, probs)

    return dispatch


def is_served(layer: Any, context: Context[None]) -> bool:
    """Return whether the layer's transfers can be overlapped; log the reason once if not."""
    dispatcher = layer.token_dispatcher
    ours = context.megatron("core.transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    if isinstance(dispatcher, ours) and dispatcher.ep_size > 1:
        problems = list(check_overlap(layer.config))
        if not problems:
            return True
        for problem in problems:
            context.log.warning("Megatron's own code runs: %s", problem, once=True)
    return False


def launch_dispatch(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Wrap ``MoEAlltoAllTokenDispatcher.token_dispatch``: start the all-to-alls without waiting."""
    calls = context.state(calls_of)

    def token_dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = calls.get(self)
        if call is None:
            return original(self, *args, **kwargs)
        with named("dispatch"), launching(call.dispatch):
            return original(self, *args, **kwargs)

    return token_dispatch


def overlap_experts(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Wrap ``MoELayer.routed_experts_compute``: wait for the dispatch, run the experts, start the combine."""
    calls = context.state(calls_of)

    def routed_experts_compute(self: Any, hidden_states: Tensor, probs: Tensor, *rest: Any) -> Any:
        call = calls.get(self.token_dispatcher)
        if call is None:
            return original(self, hidden_states, probs, *rest)
        return _around(self, call, lambda: original(self, *call.arrived(), *rest))

    return routed_experts_compute


def overlap_all_experts(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Wrap ``MoELayer.experts_compute``: run the shared expert separately from the routed experts."""
    calls = context.state(calls_of)

    def experts_compute(self: Any, hidden_states: Tensor, probs: Tensor, residual: Tensor) -> Any:
        call = calls.get(self.token_dispatcher)
        if call is None:
            return original(self, hidden_states, probs, residual)
        if self.use_shared_expert:
            call.shared = SharedOutput(partial(shared_expert_of(self, context.megatron), residual))
        output, _, bias = _around(self, call, lambda: _routed_alone(original, self, call, residual))
        return output, call.shared, bias

    return experts_compute


def _routed_alone(original: Callable[..., Any], layer: Any, call: Call, residual: Tensor) -> Any:
    has_shared, layer.use_shared_expert = layer.use_shared_expert, False
    try:
        return original(layer, *call.arrived(), residual)
    finally:
        layer.use_shared_expert = has_shared


def _around(layer: Any, call: Call, routed: Routed) -> tuple[Any, ...]:
    """Run the shared expert; between its fc1 and fc2, run the routed experts and start the combine."""
    # The second half begins where the shared expert calls fc2. Its gate and a recomputed activation function
    # are unaffected. The result has the combine's receive buffer in place of the experts' output.
    done: list[tuple[Any, ...]] = []

    def between(*_: Any) -> None:
        if not done:
            output, *others = routed()
            with named("combine", layer.layer_number), launching(call.combine):
                done.append((layer.token_dispatcher.token_combine(output), *others))
            # Only if weight gradients were deferred: they must be enough to hide the reversed dispatch.
            if any(gradient.taken for gradient in deferred):
                call.combine[0].give_way(call.dispatch[0])

    with defer_gradients(layer.experts.parameters()) as deferred:
        if call.shared is not None:
            with before_second_half(layer, between):
                call.shared.compute()
        # There is no shared expert, or its forward did not reach fc2.
        between()
    return done[0]


def wait_for_combine(original: Callable[..., Tensor], context: Context[None]) -> Callable[..., Tensor]:
    """Wrap ``token_combine``: a forward's first call starts the all-to-all, its second call waits for it."""
    calls = context.state(calls_of)

    def token_combine(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call = calls.get(self)
        if call is None or not call.combine:
            return original(self, hidden_states, *args, **kwargs)
        del calls[self]
        # The second call, after the shared expert; the first one started the transfer in _around.
        (flight,) = call.combine
        return flight.wait()

    return token_combine
