"""Recompute of norm outputs: enables Megatron's own norm recompute during the forward of selected layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.memory import chosen_layers
from mindspeed_dsa.features.memory.recompute_outputs.checkpoint import keep_inputs, within
from mindspeed_dsa.features.memory.recompute_outputs.feature import NormOptions, check_norm
from mindspeed_dsa.megatron import split_layers
from mindspeed_dsa.megatron.attribute_override import attributes
from mindspeed_dsa.megatron.low_precision import low_precision

_PROJECTIONS = (
    "linear_qkv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_kv_down_proj",
    "linear_qkv_down_proj",
)
_layers: WeakSet[Any] = WeakSet()
"""Layers whose norms are recomputed."""


def recompute_norms(original: Callable[..., Any], context: Context[NormOptions]) -> Callable[..., Any]:
    """Decorate ``TransformerLayer.forward`` to enable Megatron's norm recompute."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in _layers or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        # Megatron reads the two flags in every forward. They are reset afterwards, so that a layer that
        # outlives this feature is unchanged.
        with _recomputing(self, context):
            return original(self, *args, **kwargs)

    return forward


@contextlib.contextmanager
def _recomputing(layer: Any, context: Context[NormOptions]) -> Iterator[None]:
    identity = context.megatron("core.transformer.identity_op").IdentityOp
    flags = {
        # A norm fused into the following linear layer leaves an IdentityOp in its place.
        "recompute_input_layernorm": not isinstance(layer.input_layernorm, identity),
        "recompute_pre_mlp_layernorm": not isinstance(layer.pre_mlp_layernorm, identity),
    }
    with attributes(layer, **flags), within(f"norm of layer {layer.layer_number}"):
        yield


class _InPieces(split_layers.Pass):
    """Forward of a layer that runs as several calls; sets Megatron's recompute flags around each call."""

    def __init__(self, context: Context[NormOptions], layer: Any, *_: Any) -> None:
        self._context, self._layer = context, layer

    def piece(self) -> contextlib.AbstractContextManager[None]:
        return _recomputing(self._layer, self._context)


def _choose_with(context: Context[NormOptions]) -> Callable[[Any], None]:
    def choose(layer: Any) -> None:
        _layers.add(layer)
        if low_precision(layer.config) is not None:
            keep_inputs(*_readers(layer))
        split_layers.follow(layer, partial(_InPieces, context))

    return choose


def _readers(layer: Any) -> Iterator[Any]:
    """Yield the linear layers that read a norm's output; routed experts read a permuted copy of it."""
    attention, mlp = layer.self_attention, layer.mlp
    for name in _PROJECTIONS:
        yield getattr(attention, name, None)
    yield getattr(getattr(mlp, "shared_experts", mlp), "linear_fc1", None)


choose_in_block, choose_in_mtp = chosen_layers.decorators(_choose_with, check_norm)
