"""The steps of Megatron's MoE layer where its tokens are cut in halves.

The router sees the whole microbatch, so that what depends on all tokens is as ever: losses that balance
the load, their logs, dropped tokens. From the dispatcher on every token is computed by itself. The halves run
in the step of the routed experts; the dispatcher's other steps only pass on what they are given.

Whether tokens are cut is measured once for layers of one size, in the first step. Two halves cost more than
the whole where time does not grow with the number of tokens: small matmuls, a host that launches kernels more
slowly than the device runs them. What overlap takes back depends on the link. So forward runs whole and in
halves, with the step's own tokens, and the ranks compare the slowest one's times. Backward follows: it has
the same transfers, more computation above them, and the same calls. The choice does not depend on the number
of tokens, which may differ between ranks that have to agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.batch_overlap.feature import Options, check_choice, check_halves
from mindspeed_dsa.features.moe.batch_overlap.halves import Half, Mode, run
from mindspeed_dsa.log import Log
from mindspeed_dsa.megatron.attribute_override import AttributeOverride
from mindspeed_dsa.megatron.configuration import require
from mindspeed_dsa.megatron.measured import slowest, timed
from mindspeed_dsa.megatron.shared_expert import SharedOutput, shared_expert_of


@dataclass
class _Call:
    """One forward of one layer, as it reaches the dispatcher."""

    hidden_states: Tensor
    routing_map: Tensor
    probs: Tensor

    def halves(self, dispatcher: Any, waits: bool) -> tuple[Half, Half]:
        rows = self.hidden_states.reshape(-1, self.hidden_states.size(-1))
        cut = [tensor.tensor_split(2) for tensor in (rows, self.routing_map, self.probs)]
        first, second = (Half(dispatcher, *parts, waits=waits) for parts in zip(*cut, strict=True))
        return first, second


_modes: WeakKeyDictionary[Any, Mode] = WeakKeyDictionary()
_shared: WeakKeyDictionary[Any, SharedOutput] = WeakKeyDictionary()
_calls: WeakKeyDictionary[Any, _Call] = WeakKeyDictionary()
"""All three by dispatcher, which Megatron gives one forward at a time too."""
_measured: ContextVar[Mode | None] = ContextVar("mode that is measured", default=None)


def _mode(dispatcher: Any) -> Mode:
    """Return a layer's execution mode. Copies of its dispatcher belong to half-batches."""
    if dispatcher not in _modes:
        return "whole"
    return _measured.get() or _modes[dispatcher]


def choose_mode(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``MoELayer.forward``: the first one in training decides."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        dispatcher = self.token_dispatcher
        if self.training and dispatcher not in _modes and _is_served(self, context):
            require(context, check_choice, self.config)
            _modes[dispatcher] = "interleaved"
            if not context.options.always:
                random = context.megatron("core.tensor_parallel.random")
                step = partial(original, self, hidden_states, *args, **kwargs)
                _modes[dispatcher] = choose(self, partial(_run_measured, random, step), context.log)
        return original(self, hidden_states, *args, **kwargs)

    return forward


def _run_measured(random: Any, forward: Callable[[], object], mode: Mode) -> None:
    """Run a forward that leaves nothing behind: no graph, no counts of tokens, no change of random states."""
    token = _measured.set(mode)
    try:
        with torch.no_grad(), random._fork_rng():
            forward()
    finally:
        _measured.reset(token)


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
    """Decorate ``MoELayer.shared_experts_compute``, the first step."""

    def shared_experts_compute(self: Any, hidden_states: Tensor) -> Any:
        if _mode(self.token_dispatcher) == "whole":
            return original(self, hidden_states)
        shared = _shared_output(self, hidden_states, context)
        if shared is not None:
            _shared[self.token_dispatcher] = shared
        return shared

    return shared_experts_compute


def _shared_output(layer: Any, hidden_states: Tensor, context: Context[Options]) -> SharedOutput | None:
    if not layer.use_shared_expert:
        return None
    return SharedOutput(partial(shared_expert_of(layer, context.megatron), hidden_states))


def take_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MoEAlltoAllTokenDispatcher.dispatch_preprocess``."""

    def dispatch_preprocess(
        self: Any, hidden_states: Tensor, routing_map: Tensor, probs: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if _mode(self) == "whole":
            return original(self, hidden_states, routing_map, probs, *args, **kwargs)
        _calls[self] = _Call(hidden_states, routing_map, probs)
        return hidden_states, probs

    return dispatch_preprocess


def skip_dispatch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MoEAlltoAllTokenDispatcher.token_dispatch``."""

    def token_dispatch(self: Any, hidden_states: Tensor, probs: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self in _calls:
            return hidden_states, probs
        return original(self, hidden_states, probs, *args, **kwargs)

    return token_dispatch


def run_halves(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MoELayer.routed_experts_compute``."""

    def routed_experts_compute(self: Any, hidden_states: Tensor, probs: Tensor, *rest: Any) -> Any:
        dispatcher = self.token_dispatcher
        if dispatcher not in _calls:
            return original(self, hidden_states, probs, *rest)

        def experts(half: Any, rows: Tensor, probs: Tensor) -> Tensor:
            output: Tensor = original(AttributeOverride(self, token_dispatcher=half), rows, probs, *rest)[0]
            return output

        return _in_halves(self, experts, _shared.pop(dispatcher, None)), None

    return routed_experts_compute


def run_halves_and_shared_expert(
    original: Callable[..., Any], context: Context[Options]
) -> Callable[..., Any]:
    """Decorate ``MoELayer.experts_compute``."""

    def experts_compute(self: Any, hidden_states: Tensor, probs: Tensor, residual: Tensor) -> Any:
        if self.token_dispatcher not in _calls:
            return original(self, hidden_states, probs, residual)

        def experts(half: Any, rows: Tensor, probs: Tensor) -> Tensor:
            routed_alone = AttributeOverride(self, token_dispatcher=half, use_shared_expert=False)
            output: Tensor = original(routed_alone, rows, probs, residual)[0]
            return output

        shared = _shared_output(self, residual, context)
        return _in_halves(self, experts, shared), shared, None

    return experts_compute


def _in_halves(
    layer: Any, experts: Callable[[Any, Tensor, Tensor], Tensor], shared: SharedOutput | None
) -> Tensor:
    dispatcher = layer.token_dispatcher
    halves = _calls[dispatcher].halves(dispatcher, waits=_mode(dispatcher) == "in turn")
    return run(layer, halves, experts, shared)


def skip_combine(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``MoEAlltoAllTokenDispatcher.token_combine``."""

    def token_combine(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states if self in _calls else original(self, hidden_states, *args, **kwargs)

    return token_combine


def give_back_tokens(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``MoEAlltoAllTokenDispatcher.combine_postprocess``, the last step."""

    def combine_postprocess(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call = _calls.pop(self, None)
        if call is None:
            return original(self, hidden_states, *args, **kwargs)
        return hidden_states.view(call.hidden_states.shape)

    return combine_postprocess


# -- whether tokens are cut ------------------------------------------------------------------------

_GAIN = 0.97
"""Halves are taken only if they take less than this fraction of the whole's time."""
_ROUNDS = 5
Run = Callable[[Mode], object]
"""A layer's forward, without side effects."""

_chosen: WeakKeyDictionary[Any, dict[Hashable, Mode]] = WeakKeyDictionary()
"""By process group and size of layer."""


def choose(layer: Any, run: Run, log: Log) -> Mode:
    """Choose how layers of this size run; a collective call of all of its expert parallel ranks.

    Args:
        layer: Megatron's ``MoELayer``.
        run: its forward.
        log: gets a line for each size.
    """
    group = layer.token_dispatcher.ep_group
    known = _chosen.setdefault(group, {})
    size = _size(layer)
    if size not in known:
        times = _measure(run, group)
        known[size] = "interleaved" if times["interleaved"] < _GAIN * times["whole"] else "whole"
        _report(times, log)
    return known[size]


def _size(layer: Any) -> Hashable:
    """Return what the time of a token depends on; the same on all ranks."""
    weights = tuple((name, weight.shape, weight.dtype) for name, weight in layer.named_parameters())
    return layer.config.moe_router_topk, weights


def _measure(run: Run, group: Any) -> Mapping[Mode, float]:
    """Return the slowest rank's seconds for each mode: medians of rounds in which the modes alternate."""
    modes: tuple[Mode, ...] = get_args(Mode)
    rounds = [[timed(partial(run, mode), group) for mode in modes] for _ in range(1 + _ROUNDS)]
    medians = [statistics.median(seconds) for seconds in zip(*rounds[1:], strict=True)]
    return slowest(dict(zip(modes, medians, strict=True)), group)


def _report(times: Mapping[Mode, float], log: Log) -> None:
    whole, in_turn, interleaved = times["whole"], times["in turn"], times["interleaved"]
    if interleaved < _GAIN * whole:
        choice = "tokens are cut"
    elif in_turn - interleaved < (1 - _GAIN) * whole:
        choice = "tokens stay whole, because the transfers leave too little to hide"
    else:
        choice = (
            "tokens stay whole, because halves cost more than overlap takes back: time does not grow with "
            "the number of tokens, or the host does not keep up"
        )
    log.info(
        "forward of a layer takes %.2f ms whole, %.2f ms in two halves one after the other and %.2f ms with "
        "the halves interleaved: %s",
        *(1e3 * seconds for seconds in (whole, in_turn, interleaved)),
        choice,
        ranks="stage",
    )
