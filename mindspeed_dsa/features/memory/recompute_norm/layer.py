"""Norm outputs recomputed by Megatron's own path, in chosen layers and only for the duration of a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from mindspeed_dsa.context import Context
from mindspeed_dsa.features.memory.checkpoint import attributes, within
from mindspeed_dsa.features.memory.recompute_norm.options import Options
from mindspeed_dsa.features.memory.recompute_norm.validation import check_norm
from mindspeed_dsa.integration import layers

_layers: WeakSet[Any] = WeakSet()
"""Layers that recompute."""


def recompute_norms(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``TransformerLayer.forward``.

    Megatron reads the two attributes in every forward. They are set for its duration alone, so that a
    layer that outlives this feature is what it was before.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in _layers or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        identity = context.megatron("core.transformer.identity_op").IdentityOp
        flags = {
            # Where a norm is part of the linear layer that follows, there is an identity in its place.
            "recompute_input_layernorm": not isinstance(self.input_layernorm, identity),
            "recompute_pre_mlp_layernorm": not isinstance(self.pre_mlp_layernorm, identity),
        }
        with attributes(self, **flags), within(f"norm of layer {self.layer_number}"):
            return original(self, *args, **kwargs)

    return forward


def choose_in_block(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``TransformerBlock.__init__``."""
    return layers.choose_in_block(original, context, _layers.add, check_norm)


def choose_in_mtp(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``MultiTokenPredictionBlock.__init__``."""
    return layers.choose_in_mtp(original, context, _layers.add)
