"""Norm outputs recomputed by Megatron's own path, in chosen layers and only for the time of a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from mindspeed_dsa.features.host import host
from mindspeed_dsa.features.memory import recompute_limits
from mindspeed_dsa.features.memory.recompute_layers import after_building, after_building_mtp
from mindspeed_dsa.features.memory.recompute_outputs import attributes, within

_DEST = "recompute_norm"
_layers: WeakSet[Any] = WeakSet()


def recompute_in_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``TransformerLayer.forward``.

    Megatron reads the two attributes in every forward. They are set for its duration alone, so that a
    layer that outlives this feature is again what it was.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in _layers or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        identity = host("core.transformer.identity_op").IdentityOp
        flags = {
            # Where a norm is part of the linear layer that follows, there is an identity in its place.
            "recompute_input_layernorm": not isinstance(self.input_layernorm, identity),
            "recompute_pre_mlp_layernorm": not isinstance(self.pre_mlp_layernorm, identity),
        }
        with attributes(self, **flags), within(f"norm of layer {self.layer_number}"):
            return original(self, *args, **kwargs)

    return forward


def choose_in_block(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerBlock.__init__``."""
    return after_building(original, _layers.add, _DEST, recompute_limits.of_norm)


def choose_in_mtp(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``MultiTokenPredictionBlock.__init__``."""
    return after_building_mtp(original, _layers.add, _DEST)
