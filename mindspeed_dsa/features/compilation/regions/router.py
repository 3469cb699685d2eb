"""The router's logits, selection and scores as one graph, handed out to Megatron's own steps.

Megatron's steps between them, such as dropping tokens, auxiliary losses and statistics, run as they are. What
they ask for with which arguments is noted in a router's first pass, which is not compiled; a later pass
computes it all with the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.compilation.regions.region import regions_of, rows_of

ROUTER = "router"


class Call(NamedTuple):
    """One call of Megatron's: its arguments after the logits, tensors apart."""

    function: Callable[..., Any]
    plain: tuple[tuple[str, Any], ...]
    tensors: tuple[str, ...]


@dataclass
class _Pass:
    """One forward of a router: what Megatron asks for, or what is ready for it."""

    noted: dict[str, Call]
    calls: dict[str, Call] = field(default_factory=dict)
    logits: Tensor | None = None
    ready: dict[str, tuple[Call, tuple[Tensor, ...], Any]] = field(default_factory=dict)


_current: ContextVar[_Pass | None] = ContextVar("the router's pass", default=None)
_noted: WeakKeyDictionary[Any, dict[bool, dict[str, Call]]] = WeakKeyDictionary()
"""What was asked for in a router's pass that learns, and in one that does not, as of recomputed layers."""


def follow_router(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``TopKRouter.forward``."""

    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        noted, learns = _noted.setdefault(self, {}), _learns(self)
        current = _Pass(noted.get(learns, {}))
        token = _current.set(current)
        try:
            return original(self, input, *args, **kwargs)
        finally:
            _current.reset(token)
            noted[learns] = current.calls

    return forward


def compile_gating(original: Callable[..., Tensor], context: Context[None]) -> Callable[..., Tensor]:
    """Decorate ``TopKRouter.gating``."""
    regions = regions_of(context)

    def gating(self: Any, input: Tensor) -> Tensor:
        current = _current.get()
        if current is None or not current.noted or not regions.usable(input):
            return original(self, input)
        if (reason := _why_not(self, context)) is not None:
            regions.declined(ROUTER, reason)
            return original(self, input)
        calls = tuple(current.noted.values())
        tensors = tuple([tuple([getattr(self, name) for name in call.tensors]) for call in calls])
        dtype = _DTYPES.get(self.config.moe_router_dtype, input.dtype)
        region = regions.of(ROUTER, route)
        logits, *found = region(rows_of(input), self.weight, self.bias, dtype, calls, tensors)
        current.logits = logits
        current.ready = dict(zip(current.noted, zip(calls, tensors, found, strict=True), strict=True))
        return logits.unflatten(0, input.shape[:-1])  # type: ignore[no-any-return]

    return gating


def _learns(router: Any) -> bool:
    return bool(router.training and torch.is_grad_enabled())


_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
SELECTION, SCORES = "selection", "scores"


def route(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    calls: tuple[Call, ...],
    tensors: tuple[tuple[Tensor, ...], ...],
) -> tuple[Any, ...]:
    """Return logits ``[tokens, experts]``, then what Megatron's functions return for them.

    Args:
        rows: ``[tokens, hidden]``.
        weight: ``[experts, hidden]``.
        bias: ``[experts]``.
        dtype: of the logits.
        calls: Megatron's functions and their arguments.
        tensors: for each call, those of its arguments that are tensors.
    """
    logits = F.linear(rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    found = [
        call.function(logits, **dict(call.plain), **dict(zip(call.tensors, given, strict=True)))
        for call, given in zip(calls, tensors, strict=True)
    ]
    return logits, *found


def hand_out_selection(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``topk_routing_with_score_function``."""
    return _hand_out(original, SELECTION)


def hand_out_scores(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``compute_routing_scores_for_aux_loss``."""
    return _hand_out(original, SCORES)


def _hand_out(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def routing_function(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        current = _current.get()
        if current is None or torch.compiler.is_compiling():
            return original(logits, *args, **kwargs)
        asked, tensors = _call(original, args, kwargs)
        if asked is not None:
            current.calls[name] = asked
        if name in current.ready and _is_same(logits, current.logits):
            call, given, found = current.ready[name]
            same = all(one is other for one, other in zip(given, tensors, strict=False))
            if call == asked and len(given) == len(tensors) and same:
                return found
        return original(logits, *args, **kwargs)

    return routing_function


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Call | None, tuple[Tensor, ...]]:
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in given.items() if name not in tensors}
    known = set(tensors) <= {"expert_bias"}
    if not known or not all(
        value is None or isinstance(value, (int, float, str)) for value in plain.values()
    ):
        return None, ()
    return Call(function, tuple(plain.items()), tuple(tensors)), tuple(tensors.values())


def _is_same(logits: Tensor, computed: Tensor | None) -> bool:
    """Return whether these are the computed logits, or a view of all of them."""
    return (
        computed is not None
        and logits.shape == computed.shape
        and logits.dtype == computed.dtype
        and logits.data_ptr() == computed.data_ptr()
    )


def _why_not(router: Any, context: Context[None]) -> str | None:
    config = router.config
    if getattr(config, "moe_router_fusion", False):
        return "--moe-router-fusion has operators of its own"
    if getattr(config, "moe_z_loss_coeff", None) is not None:
        return "the z-loss changes the logits' gradient between the steps"
    if getattr(config, "moe_router_force_load_balancing", False):
        return "forced load balancing replaces the logits"
    if getattr(router, "router_replay", None) is not None:
        return "the selection is replayed"
    if router.weight.device.type == "cpu" and config.use_cpu_initialization and torch.cuda.is_available():
        return "its weight is still on the host"
    if context.megatron("core.extensions.transformer_engine").HAVE_TE:
        return "Transformer Engine computes its logits"
    return None
