"""Patches of Megatron's MoE layer that run its tokens in halves, without attention.

The router runs on the whole microbatch, so load balancing losses, their logs and token dropping are
unchanged. After the router, tokens do not depend on each other. Both halves run inside
``routed_experts_compute``; the dispatcher's other methods return their arguments unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.batch_overlap.choice import State
from mindspeed_dsa.features.moe.batch_overlap.feature import Options, check_choice, check_halves
from mindspeed_dsa.features.moe.batch_overlap.halves import Half, Mode, run
from mindspeed_dsa.megatron.attribute_override import AttributeOverride
from mindspeed_dsa.megatron.configuration import require
from mindspeed_dsa.megatron.shared_expert import SharedOutput, shared_expert_of


@dataclass
class _Call:
    """Arguments of the dispatcher, kept during one forward of one layer."""

    hidden_states: Tensor
    routing_map: Tensor
    probs: Tensor

    def halves(self, dispatcher: Any, waits: bool) -> tuple[Half, Half]:
        rows = self.hidden_states.reshape(-1, self.hidden_states.size(-1))
        cut = [tensor.tensor_split(2) for tensor in (rows, self.routing_map, self.probs)]
        parts = enumerate(zip(*cut, strict=True))
        first, second = (Half(number, dispatcher, *mine, waits=waits) for number, mine in parts)
        return first, second


def _runs_whole(dispatcher: Any, state: State) -> bool:
    """Return whether a dispatcher runs its tokens unsplit. True for the copies that the halves use."""
    return state.modes.get(dispatcher, "whole") == "whole"


def choose_mode(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``MoELayer.forward``: choose the layer's mode in the first training forward."""
    state = context.state(State)

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        dispatcher = self.token_dispatcher
        undecided = dispatcher not in state.modes and not state.is_measured
        if self.training and undecided and _is_served(self, context):
            require(context, check_choice, self.config)
            state.modes[dispatcher] = "interleaved"
            if not context.options.always:

                def run(mode: Mode) -> None:
                    state.modes[dispatcher] = mode
                    original(self, hidden_states, *args, **kwargs)

                state.modes[dispatcher] = state.choose(self, dispatcher.ep_group, run)
        return original(self, hidden_states, *args, **kwargs)

    return forward


def _is_served(layer: Any, context: Context[Options]) -> bool:
    dispatcher = layer.token_dispatcher
    ours = context.megatron("core.transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    if isinstance(dispatcher, ours) and dispatcher.ep_size > 1:
        problems = list(check_halves(layer.config, context.options))
        if not problems:
            return True
        for problem in problems:
            context.log.warning("tokens stay whole: %s", problem, once=True)
    return False


def postpone_shared_expert(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``MoELayer.shared_experts_compute``, the layer's first step: run the shared expert later."""
    state = context.state(State)

    def shared_experts_compute(self: Any, hidden_states: Tensor) -> Any:
        if state.half is not None:
            return state.half.postpone(_shared_output(self, hidden_states, context))
        if _runs_whole(self.token_dispatcher, state):
            return original(self, hidden_states)
        shared = _shared_output(self, hidden_states, context)
        if shared is not None:
            state.shared[self.token_dispatcher] = shared
        return shared

    return shared_experts_compute


def _shared_output(layer: Any, hidden_states: Tensor, context: Context[Options]) -> SharedOutput | None:
    if not layer.use_shared_expert:
        return None
    return SharedOutput(partial(shared_expert_of(layer, context.megatron), hidden_states))


def take_tokens(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``MoEAlltoAllTokenDispatcher.dispatch_preprocess``: keep its arguments for the halves."""
    state = context.state(State)

    def dispatch_preprocess(
        self: Any, hidden_states: Tensor, routing_map: Tensor, probs: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if _runs_whole(self, state):
            return original(self, hidden_states, routing_map, probs, *args, **kwargs)
        state.calls[self] = _Call(hidden_states, routing_map, probs)
        return hidden_states, probs

    return dispatch_preprocess


def skip_dispatch(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``MoEAlltoAllTokenDispatcher.token_dispatch``: do nothing, because the halves dispatch later."""
    state = context.state(State)

    def token_dispatch(self: Any, hidden_states: Tensor, probs: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self in state.calls:
            return hidden_states, probs
        return original(self, hidden_states, probs, *args, **kwargs)

    return token_dispatch


def run_halves(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``MoELayer.routed_experts_compute``: run both halves."""
    state = context.state(State)

    def routed_experts_compute(self: Any, hidden_states: Tensor, probs: Tensor, *rest: Any) -> Any:
        dispatcher = self.token_dispatcher
        if dispatcher not in state.calls:
            return original(self, hidden_states, probs, *rest)

        def experts(half: Any, rows: Tensor, probs: Tensor) -> Tensor:
            output: Tensor = original(AttributeOverride(self, token_dispatcher=half), rows, probs, *rest)[0]
            return output

        return _in_halves(self, experts, state.shared.pop(dispatcher, None), state), None

    return routed_experts_compute


def run_halves_and_shared_expert(
    original: Callable[..., Any], context: Context[Options]
) -> Callable[..., Any]:
    """Wrap ``MoELayer.experts_compute`` of older releases: run both halves and the shared expert."""
    state = context.state(State)

    def experts_compute(self: Any, hidden_states: Tensor, probs: Tensor, residual: Tensor) -> Any:
        if self.token_dispatcher not in state.calls:
            return original(self, hidden_states, probs, residual)

        def experts(half: Any, rows: Tensor, probs: Tensor) -> Tensor:
            routed_alone = AttributeOverride(self, token_dispatcher=half, use_shared_expert=False)
            output: Tensor = original(routed_alone, rows, probs, residual)[0]
            return output

        shared = _shared_output(self, residual, context)
        return _in_halves(self, experts, shared, state), shared, None

    return experts_compute


def _in_halves(
    layer: Any, experts: Callable[[Any, Tensor, Tensor], Tensor], shared: SharedOutput | None, state: State
) -> Tensor:
    dispatcher = layer.token_dispatcher
    halves = state.calls[dispatcher].halves(dispatcher, waits=state.modes.get(dispatcher) == "in turn")
    return run(layer, halves, experts, shared)


def skip_combine(original: Callable[..., Tensor], context: Context[Options]) -> Callable[..., Tensor]:
    """Wrap ``MoEAlltoAllTokenDispatcher.token_combine``: do nothing, because the halves have combined."""
    calls = context.state(State).calls

    def token_combine(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states if self in calls else original(self, hidden_states, *args, **kwargs)

    return token_combine


def give_back_tokens(original: Callable[..., Tensor], context: Context[Options]) -> Callable[..., Tensor]:
    """Wrap ``MoEAlltoAllTokenDispatcher.combine_postprocess``, the last step: restore the input's shape."""
    calls = context.state(State).calls

    def combine_postprocess(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call = calls.pop(self, None)
        if call is None:
            return original(self, hidden_states, *args, **kwargs)
        return hidden_states.view(call.hidden_states.shape)

    return combine_postprocess
