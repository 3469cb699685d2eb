"""PyTorch norms for Megatron's layers: with sequence parallelism, and fused into linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class SequenceParallelLayerNorm(torch.nn.LayerNorm):
    """LayerNorm whose weights Megatron reduces over tensor parallel ranks under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered_gamma = _prepare_norm(self, config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., hidden_size]`` to the same shape and dtype."""
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return F.layer_norm(hidden_states, self.normalized_shape, weight, self.bias, self.eps)


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight Megatron reduces over tensor parallel ranks under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered_gamma = _prepare_norm(self, config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., hidden_size]`` to the same shape and dtype."""
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return F.rms_norm(hidden_states, self.normalized_shape, weight, self.eps)


def _prepare_norm(norm: torch.nn.Module, config: Any) -> bool:
    """Mark the parameters; with ``layernorm_zero_centered_gamma`` the stored weight is gamma - 1."""
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    zero_centered = bool(config.layernorm_zero_centered_gamma)
    if zero_centered:
        torch.nn.init.zeros_(norm.weight)  # type: ignore[arg-type]
    return zero_centered


RMSNorm = Callable[[Tensor, Tensor, float], Tensor]
"""Of ``[..., hidden]``, the weight ``[hidden]`` and epsilon."""
_RMS_NORM = "rms_norm"


def normalize_with(layer: Any, rms_norm: RMSNorm) -> None:
    """Let another function compute the RMSNorm of a linear layer that holds its parameters."""
    setattr(layer, _RMS_NORM, rms_norm)


def _rms_norm_of_torch(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(hidden_states, weight.shape, weight, eps)


def norm_of_fused_layer(layer: Any, hidden_states: Tensor, config: Any) -> Tensor:
    """The norm before a linear layer that holds its parameters, ours or Transformer Engine's.

    Args:
        layer: has ``layer_norm_weight`` and, for LayerNorm, ``layer_norm_bias``, both ``[hidden]``.
        hidden_states: ``[..., hidden]``.
        config: Megatron's; ``normalization`` is ``"RMSNorm"`` or ``"LayerNorm"``.

    Returns:
        Tensor of the shape of ``hidden_states``.
    """
    weight = layer.layer_norm_weight
    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    if config.normalization == "RMSNorm":
        rms_norm: RMSNorm = getattr(layer, _RMS_NORM, _rms_norm_of_torch)
        return rms_norm(hidden_states, weight, config.layernorm_epsilon)
    return F.layer_norm(hidden_states, weight.shape, weight, layer.layer_norm_bias, config.layernorm_epsilon)


_NORMS = {"LayerNorm": SequenceParallelLayerNorm, "RMSNorm": SequenceParallelRMSNorm}


def norm_for_every_setting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``WrappedTorchNorm.__new__``: support the settings for which it rejects PyTorch's norms."""

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
