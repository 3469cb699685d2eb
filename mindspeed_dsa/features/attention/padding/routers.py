"""Patches that exclude padding from router losses and counts.

Padding tokens are still routed to experts, but give them no gradient. Does not import Megatron, because it is
loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from mindspeed_dsa.context_parallel.layout import data_rows
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.attention.padding.feature import Options

_share: ContextVar[float | Tensor] = ContextVar("_share", default=1.0)
"""Weight of the running router's z-loss, by the tokens of its rank."""


def leave_out_padding(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``TopKRouter.routing`` to pass a padding mask.

    The mask is computed from the layout of the sequence. It is therefore available on every pipeline stage,
    in multi-token prediction and in recomputation, where Megatron passes no mask.
    """
    padding = context.options.padding

    def routing(self: Any, logits: Tensor, padding_mask: Tensor | None = None, **others: Any) -> Any:
        state = context.megatron("core.parallel_state")
        counted = data_rows(padding, logits, self.config.sequence_parallel, state)
        if counted is None:
            return original(self, logits, padding_mask, **others)
        left_out = ~counted
        # Weight of this rank's tokens in the mean over ranks. A per-token loss is weighed by tokens later.
        # 2 ranks, 6 tokens padded to 8, rows 4 and 2 data: shares 1 * 8 / 6 = 1.33 and 0.5 * 8 / 6 = 0.67.
        share = float(counted.float().mean()) * padding.length / padding.tokens
        mask = left_out if padding_mask is None else left_out | padding_mask
        with weighed(1.0 if self.config.calculate_per_token_loss else share):
            return original(self, logits, mask, **others)

    return routing


@contextmanager
def weighed(share: float | Tensor) -> Iterator[None]:
    """Context in which the router's z-loss is multiplied by ``share``, this rank's weight."""
    token = _share.set(share)
    try:
        yield
    finally:
        _share.reset(token)


def count_tokens(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TopKRouter._apply_expert_bias`` to reshape the padding mask, so that it broadcasts."""

    def _apply_expert_bias(
        self: Any, routing_map: Tensor, padding_mask: Tensor | None = None, **others: Any
    ) -> None:
        if padding_mask is not None and padding_mask.dim() == 1:
            # [tokens] -> [tokens, 1], against the routing map [tokens, experts]
            padding_mask = padding_mask[:, None]
        original(self, routing_map, padding_mask=padding_mask, **others)

    return _apply_expert_bias


def average_over_ranks(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``z_loss_func`` to multiply the loss by the weight that :func:`weighed` has set.

    Megatron averages the per-rank means, although ranks have different numbers of tokens.
    """

    def z_loss_func(*args: Any, **kwargs: Any) -> Tensor:
        share = _share.get()
        # Two features install this wrapper: 1.0 inside, so that only the outer one weighs.
        with weighed(1.0):
            return original(*args, **kwargs) * share

    return z_loss_func
