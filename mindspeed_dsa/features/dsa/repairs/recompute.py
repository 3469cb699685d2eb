"""DSA's core attention under activation checkpointing: with its indexer, and never with a shared selection.

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.key_exchange.layers import recomputes
from mindspeed_dsa.features.dsa.repairs.feature import check_recompute, uses_dsa
from mindspeed_dsa.megatron.configuration import require


def leave_recompute_to_dsa(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``MLASelfAttention.__init__``: a DSA core attention recomputes itself."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        dsa = context.megatron("core.transformer.experimental_attention_variant.dsa")
        if isinstance(self.core_attention, dsa.DSAttention):
            self.checkpoint_core_attention = False

    return __init__


def recompute_in_backward(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``DSAttention.forward``: checkpoint it with the indexer's inputs.

    The first pass runs without gradients, where DSA computes no indexer loss; the second, in backward,
    computes it once.
    """

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not (self.training and torch.is_grad_enabled() and recomputes(self.config)):
            return original(self, query, key, value, attention_mask, x, qr, *args, **kwargs)

        def run(query: Tensor, key: Tensor, value: Tensor, x: Tensor, qr: Tensor) -> Any:
            return original(self, query, key, value, attention_mask, x, qr, *args, **kwargs)

        return context.megatron("core.tensor_parallel").checkpoint(run, False, query, key, value, x, qr)

    return forward


def refuse_recompute(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__``: refuse layers that share a selection of keys."""

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if uses_dsa(self):
            require(context, check_recompute, self)
        original(self, *args, **kwargs)

    return __post_init__
