"""Decorator of Megatron's MoE router that logs the load of its experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dsa_router_load.feature import Options
from mindspeed_dsa.feature import Context


def log_load(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``TopKRouter.forward``: log the load, and return the original result."""
    # The counts belong to this decorator, not to the module: another session in the process has its own.
    calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, input, *args, **kwargs)
        # Recomputed layers run twice, the first time without gradients; evaluation also runs without
        # gradients.
        if torch.is_grad_enabled():
            calls[self] = calls.get(self, 0) + 1
            if calls[self] % context.options.interval == 0:
                _, routing_map = result
                context.log.info(
                    "layer %s, call %d: %s", self.layer_number, calls[self], describe(routing_map)
                )
        return result

    return forward


def describe(routing_map: Tensor) -> str:
    """Return the load of the experts in words.

    Args:
        routing_map: bool ``[tokens, experts]``, true where a token goes to an expert.
    """
    load = routing_map.detach().sum(dim=0)
    experts, idle = load.numel(), int((load == 0).sum())
    unevenness = load.max().item() * experts / max(load.sum().item(), 1)
    return f"the busiest of {experts} experts got {unevenness:.2f} times the mean load, {idle} got nothing"
