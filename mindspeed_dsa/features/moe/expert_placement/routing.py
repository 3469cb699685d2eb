"""From the router's experts to the dispatcher's slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.expert_placement.feature import Options
from mindspeed_dsa.megatron import moe_layers


class _Columns(torch.autograd.Function):
    """Columns in another order; backward gathers too, where indexing would add into zeros."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return values.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(1, ctx.inverse), None, None


def route_to_slots(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``TopKRouter.forward``, outside of everything that is about experts.

    Probabilities and routing map are ``[tokens, experts]``; their columns become slots.
    """
    orders: WeakKeyDictionary[Any, tuple[tuple[int, ...], Tensor, Tensor]] = WeakKeyDictionary()

    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, input, *args, **kwargs)
        order = moe_layers.order_of(self)
        if order is None:
            return result
        probs, routing_map = result
        known = orders.get(self)
        if known is None or known[0] != order or known[1].device != probs.device:
            by_slot = torch.tensor(order, device=probs.device)
            known = orders[self] = order, by_slot, by_slot.argsort()
        _, by_slot, inverse = known
        return _Columns.apply(probs, by_slot, inverse), routing_map.index_select(1, by_slot)

    return forward
