"""Megatron's two functions for a fused SwiGLU, and the MLPs that do without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.megatron.attribute_override import AttributeOverride
from mindspeed_dsa.ops.swiglu import swiglu


def fuse_swiglu(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``bias_swiglu_impl``."""

    def bias_swiglu_impl(input: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        if _asks_for_more(args, kwargs):
            return original(input, bias, *args, **kwargs)
        return swiglu(input, bias)

    return bias_swiglu_impl


def fuse_weighted_swiglu(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``weighted_bias_swiglu_impl``, which refuses a bias."""

    def weighted_bias_swiglu_impl(
        input: Tensor, bias: Tensor | None, weights: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if bias is not None or _asks_for_more(args, kwargs):
            return original(input, bias, weights, *args, **kwargs)
        return swiglu(input, scale=weights)

    return weighted_bias_swiglu_impl


def _asks_for_more(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether backward is to keep something else, in 8 bits or on the host, or values are to be clamped."""
    return any(value is not None and value is not False for value in (*args, *kwargs.values()))


def fuse_in_mlp(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MLP.forward``: with Megatron's fusion on, it calls the functions above."""

    def forward(
        self: Any, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> Any:
        config = self.config
        if config.bias_activation_fusion or not is_plain_swiglu(self, config):
            return original(self, hidden_states, per_token_scale, **kwargs)
        if per_token_scale is not None and config.add_bias_linear:  # which Megatron's function refuses
            return original(self, hidden_states, per_token_scale, **kwargs)
        fusing = AttributeOverride(config, bias_activation_fusion=True, activation_func_fp8_input_store=False)
        return original(AttributeOverride(self, config=fusing), hidden_states, per_token_scale, **kwargs)

    return forward


def is_plain_swiglu(mlp: Any, config: Any) -> bool:
    """Whether the activation is SwiGLU without what releases have added to it: clamps, offsets, modules."""
    return (
        mlp.activation_func is F.silu
        and config.gated_linear_unit
        and not getattr(config, "use_te_activation_func", False)
        and getattr(config, "activation_func_clamp_value", None) is None
        and not getattr(config, "glu_linear_offset", 0)
    )
