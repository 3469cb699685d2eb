"""Router that gets the two halves one after the other, but computes losses on the whole microbatch.

A token's experts do not depend on other tokens, but load balancing losses, their logs and expert bias counts
do. So for the first half, the router only selects experts. For the second half, Megatron's own code runs on
the logits of both halves. It attaches its losses to the second half's probabilities; their gradients reach
the logits of both halves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.batch_overlap.choice import State
from mindspeed_dsa.features.moe.batch_overlap.feature import Options
from mindspeed_dsa.megatron.expert_parallel import CONTINUES


class Routing:
    """Router state of a layer's two halves.

    Args:
        dim: dimension of ``[sequence, batch, experts]`` along which the microbatch is split.
    """

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._first: Tensor | None = None

    def route(
        self, router: Any, logits: Tensor, choose: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Route half 0 in the first call, half 1 in the second. Returns probabilities and routing map.

        Args:
            router: Megatron's router.
            logits: logits of the half, ``[sequence, batch, experts]``.
            choose: Megatron's ``routing`` bound to this router.
        """
        first, self._first = self._first, None
        setattr(router, CONTINUES, first is None)
        if first is None:
            self._first = logits
            with _alone(router):
                return choose(logits)
        probs, routing_map = choose(torch.cat((first, logits), dim=self._dim))
        # The router returns [tokens of both halves, experts]; cut it as [sequence, batch, experts].
        shape = [*logits.shape[:2], -1]
        shape[self._dim] += first.shape[self._dim]

        def second(of_both: Tensor) -> Tensor:
            half = of_both.view(shape).narrow(self._dim, first.shape[self._dim], logits.shape[self._dim])
            return half.flatten(0, 1)

        return second(probs), second(routing_map)


@contextlib.contextmanager
def _alone(router: Any) -> Iterator[None]:
    """Context that disables the router's losses, logs and counts, so that it only selects experts."""
    training, enable_expert_bias = router.training, router.enable_expert_bias
    router.training = router.enable_expert_bias = False
    try:
        yield
    finally:
        router.training, router.enable_expert_bias = training, enable_expert_bias


def route_halves(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``TopKRouter.routing``: route each half with :class:`Routing` if attention runs in halves."""
    if context.options.attention is False:
        return original
    state = context.state(State)

    def routing(self: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        if state.half is None:
            return original(self, logits, *args, **kwargs)
        return state.half.routing.route(self, logits, lambda both: original(self, both, *args, **kwargs))

    return routing
