"""Where Megatron insists on Transformer Engine, what it gets without.

Imports nothing of Megatron: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.features.attention.local_norms import SequenceParallelLayerNorm, SequenceParallelRMSNorm

_NORMS = {"LayerNorm": SequenceParallelLayerNorm, "RMSNorm": SequenceParallelRMSNorm}


def provide_local_modules(original: Callable[..., Any]) -> Callable[..., Any]:
    """``transformer_impl="local"`` gets a provider; everything else is Megatron's business."""

    def _get_backend_spec_provider(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.transformer_impl != "local":
            return original(config, *args, **kwargs)
        from mindspeed_dsa.features.attention.local_spec_provider import LocalDSASpecProvider

        return LocalDSASpecProvider()

    return _get_backend_spec_provider


def gate_without_transformer_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``router_gating_linear``: the product by autograd where there is no kernel."""

    def router_gating_linear(inp: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Any:
        from mindspeed_dsa.features.attention.te_presence import TRANSFORMER_ENGINE_IS_USABLE

        if TRANSFORMER_ENGINE_IS_USABLE:
            return original(inp, weight, *rest, **named)
        # From 0.15 on there is a bias in front of the dtype.
        *biases, router_dtype = *rest, *named.values()
        bias = biases[0] if biases else None
        # [tokens, hidden] x [experts, hidden]^T -> [tokens, experts]; gradients return in the inputs' dtypes.
        bias = None if bias is None else bias.to(router_dtype)
        return F.linear(inp.to(router_dtype), weight.to(router_dtype), bias)

    return router_gating_linear


def norm_for_every_setting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``WrappedTorchNorm.__new__``: serve the settings for which it refuses PyTorch's norms."""

    def __new__(
        cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any
    ) -> Any:
        norm = _NORMS.get(config.normalization)
        refused = (
            config.sequence_parallel or config.persist_layer_norm or config.layernorm_zero_centered_gamma
        )
        if refused and norm is not None and not config.memory_efficient_layer_norm:
            return norm(config, hidden_size, eps)
        return original(cls, config, hidden_size, eps, *args, **kwargs)

    return __new__
