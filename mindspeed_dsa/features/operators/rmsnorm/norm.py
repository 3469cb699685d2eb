"""The places of a local model where an RMSNorm is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_dsa.megatron.local_norms import SequenceParallelRMSNorm, normalize_with
from mindspeed_dsa.ops.rms_norm import rms_norm


class FusedRMSNorm(SequenceParallelRMSNorm):
    """RMSNorm on our operator; parameters, their attributes and state dicts are those of PyTorch's."""

    eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., hidden_size]`` to the same shape and dtype."""
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return rms_norm(hidden_states, weight, self.eps)


def build_fused_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``WrappedTorchNorm.__new__``."""

    def __new__(
        cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any
    ) -> Any:
        if config.normalization != "RMSNorm" or config.memory_efficient_layer_norm:
            return original(cls, config, hidden_size, eps, *args, **kwargs)
        return FusedRMSNorm(config, hidden_size, eps)

    return __new__


def fuse_in_linear_layers(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerLayer.__init__``: the norms that are part of its linear layers."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for module in self.modules():
            if hasattr(module, "layer_norm_weight"):
                normalize_with(module, rms_norm)

    return __init__
