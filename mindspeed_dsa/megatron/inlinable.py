"""Weights of linear layers and norms, to inline into compiled graphs instead of calling the modules.

A module's own forward must run if it does more than a matmul or a norm: it communicates, accumulates the
weight gradient into ``main_grad`` itself, has hooks, or is of an unknown class, such as one with an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.megatron.gathered_weights import wait_for_weights, waits_for_weights
from mindspeed_dsa.megatron.local_modules import SequenceParallelLayerNorm, SequenceParallelRMSNorm
from mindspeed_dsa.ops.precision import normalize
from mindspeed_dsa.parallel import weight_gradients


class Norm(NamedTuple):
    """Weight, bias and epsilon of a norm over the last dimension, to inline into a compiled graph."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float | None
    is_rms: bool
    zero_centered: bool

    def of(self, states: Tensor) -> Tensor:
        """Normalise ``[..., n]``; keeps shape and dtype."""
        weight = self.weight
        if weight is None:
            return states
        weight = weight + 1 if self.zero_centered else weight
        if self.is_rms:
            return normalize(F.rms_norm, states, weight, self.eps)
        return normalize(F.layer_norm, states, weight, self.bias, self.eps)


NO_NORM = Norm(None, None, None, True, False)


class Linear(NamedTuple):
    """Weight ``[out, in]`` of a linear layer and its optional input norm, to inline into a compiled graph."""

    weight: Tensor
    norm: Norm

    def of(self, states: Tensor) -> Tensor:
        """Project ``[..., in]`` to ``[..., out]``."""
        return F.linear(self.norm.of(states), self.weight)


@cache
def _classes(megatron: Megatron) -> tuple[Any, Any, Any]:
    """Return Megatron's identity module and its column and row parallel linear layers."""
    layers = megatron("core.tensor_parallel.layers")
    identity = megatron("core.transformer.identity_op").IdentityOp
    return identity, layers.ColumnParallelLinear, layers.RowParallelLinear


def norm_of(module: Any, megatron: Megatron) -> Norm | None:
    """Return the weights of a norm module, or ``None`` if a compiled graph cannot inline them.

    ``None`` means that the module's own forward must run.
    """
    if type(module) is _classes(megatron)[0]:
        return NO_NORM
    ours = (SequenceParallelRMSNorm, SequenceParallelLayerNorm)
    # Subclasses of ours only use other kernels; subclasses of torch's norms may compute anything.
    known = type(module) in (torch.nn.RMSNorm, torch.nn.LayerNorm) or isinstance(module, ours)
    is_rms = isinstance(module, torch.nn.RMSNorm)
    if not known or _has_hooks(module) or module.weight is None:
        return None
    zero_centered = getattr(module, "zero_centered_gamma", False)
    return Norm(module.weight, getattr(module, "bias", None), module.eps, is_rms, zero_centered)


def linear_of(module: Any, megatron: Megatron) -> Linear | None:
    """Return the weights of a linear module, or ``None`` if a compiled graph cannot inline them.

    ``None`` means that the module's own forward must run.
    """
    weight = getattr(module, "weight", None)
    # DTensors and quantised weights have other types.
    if type(weight) is not torch.nn.Parameter or _has_hooks(module) or _is_held(weight):
        return None
    if getattr(module, "bias", None) is not None:
        return None
    # Class attributes are read from this very class, because a subclass may compute something else.
    if type(module).__dict__.get("is_one_product"):  # replicated on every rank
        return Linear(weight, NO_NORM)
    _, by_column, by_row = _classes(megatron)
    if type(module) is by_row:
        # Fewer columns than input_size: the weight is one rank's shard.
        return Linear(weight, NO_NORM) if weight.size(1) == module.input_size and _is_local(module) else None
    has_norm = type(module).__dict__.get("is_norm_and_product")
    if not (has_norm or type(module) is by_column):
        return None
    # Fewer rows than output_size: the weight is one rank's shard.
    if weight.size(0) != module.output_size or not _is_local(module):
        return None
    norm = NO_NORM
    if has_norm:
        config = module.config
        is_rms = config.normalization == "RMSNorm"
        bias = None if is_rms else module.layer_norm_bias
        zero_centered = bool(config.layernorm_zero_centered_gamma)
        norm = Norm(module.layer_norm_weight, bias, config.layernorm_epsilon, is_rms, zero_centered)
    return Linear(weight, norm)


def _has_hooks(module: Any) -> bool:
    """Return whether a module has hooks. Hooks that wait for its weights are run now, and do not count."""
    waits = module._forward_pre_hooks
    if waits and all(map(waits_for_weights, waits.values())):
        wait_for_weights(module)
        waits = {}
    return bool(
        waits
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def _is_held(weight: Tensor) -> bool:
    """Return whether Megatron's FSDP manages the weight, or its gradient is deferred past the backward."""
    return "__fsdp_param__" in vars(weight) or weight_gradients.is_deferred(weight)


def _is_local(module: Any) -> bool:
    """Return whether a tensor parallel layer runs on one rank and autograd computes its weight gradient."""
    # nn.Module.__getattr__ is slow for missing attributes, so look in the instance dictionary.
    config, attributes = module.config, vars(module)
    return not (
        config.tensor_model_parallel_size > 1
        or module.sequence_parallel
        or module.gradient_accumulation_fusion
        or attributes.get("explicit_expert_comm", False)
        or attributes.get("grad_output_buffer") is not None
        or getattr(config, "defer_embedding_wgrad_compute", False)
        or getattr(config, "cpu_offloading", False)
        or getattr(config, "fp8", None)
        or getattr(config, "fp4", None)
    )


def linears_of(modules: Sequence[Any], megatron: Megatron) -> list[Tensor] | None:
    """Return the weights of linear modules, or ``None`` if one cannot be inlined or contains a norm."""
    weights = []
    for module in modules:
        linear = linear_of(module, megatron)
        if linear is None or linear.norm is not NO_NORM:
            return None
        weights.append(linear.weight)
    return weights
