"""Decorators that replace Megatron's functions by fused operators, in the order of ``feature.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.operators.fused.feature import SwigluOptions
from mindspeed_dsa.megatron.attribute_override import AttributeOverride, Function
from mindspeed_dsa.megatron.gathered_weights import waits_for_weights
from mindspeed_dsa.megatron.inlinable import linears_of
from mindspeed_dsa.megatron.local_modules import SequenceParallelRMSNorm, normalize_with
from mindspeed_dsa.ops.grouped_matmul import multiply_apart
from mindspeed_dsa.ops.rms_norm import rms_norm
from mindspeed_dsa.ops.rotary import Rotation, rotate, rotation
from mindspeed_dsa.ops.rotary.backends import Layout
from mindspeed_dsa.ops.swiglu import swiglu

# -- mask-arithmetic -----------------------------------------------------------------------------


class _FillingByMask(TorchFunctionMode):
    """Mode that runs ``tensor[mask] = number`` as ``masked_fill_``, which needs no device synchronization.

    Multiplication with the mask would be wrong: it turns masked elements that are infinite into NaN.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__setitem__:
            tensor, index, value = args
            mask = _mask_of(tensor, index)
            if mask is not None and isinstance(value, (int, float)):
                tensor.masked_fill_(mask, value)
                return None
        return func(*args, **(kwargs or {}))


def _mask_of(tensor: Tensor, index: Any) -> Tensor | None:
    """Return ``index`` as a mask broadcastable to ``tensor``; None unless it is a mask over leading axes."""
    mask, *rest = index if isinstance(index, tuple) else (index,)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or any(each != slice(None) for each in rest):
        return None
    if mask.shape != tensor.shape[: mask.dim()]:
        return None
    return mask.reshape(mask.shape + (1,) * (tensor.dim() - mask.dim()))


def fill_by_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of Megatron to run under :class:`_FillingByMask`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler does the same by itself
            return original(*args, **kwargs)
        with _FillingByMask():
            return original(*args, **kwargs)

    return run


# -- rmsnorm -------------------------------------------------------------------------------------


class FusedRMSNorm(SequenceParallelRMSNorm):
    """RMSNorm by the fused operator, with the same parameters, attributes and state dict as PyTorch's."""

    eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize ``[..., hidden_size]`` to the same shape and dtype."""
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return rms_norm(hidden_states, weight, self.eps)


def build_fused_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``WrappedTorchNorm.__new__``: build the fused RMSNorm."""

    def __new__(
        cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any
    ) -> Any:
        if config.normalization != "RMSNorm" or config.memory_efficient_layer_norm:
            return original(cls, config, hidden_size, eps, *args, **kwargs)
        return FusedRMSNorm(config, hidden_size, eps)

    return __new__


def fuse_in_linear_layers(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerLayer.__init__``: in linear layers that include a norm, compute it fused."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for module in self.modules():
            if hasattr(module, "layer_norm_weight"):
                normalize_with(module, rms_norm)

    return __init__


# -- rotary-pos-emb: all batch layouts call the decorated function ------------------------------------

# Tables per tensor of angles, e.g. for several sequence lengths, layouts and dtypes.
_MOST = 16


class _Rotations:
    """Cache of sine and cosine tables; an entry is dropped when its angles tensor is freed."""

    def __init__(self) -> None:
        self._of: Any = WeakIdKeyDictionary()

    def of(self, angles: Tensor, scale: float, layout: Layout, like: Tensor) -> Rotation:
        """Return the tables for these angles; recompute them if the angles were modified in place."""
        # Callers slice the angles to the sequence length, so each call has a new view of the same base
        # tensor.
        lasting = angles._base if angles._base is not None else angles
        if angles.is_inference() or lasting.is_inference():  # these have no version
            return rotation(angles, scale, layout, like)
        tables = self._of.setdefault(lasting, {})
        place = angles.shape, angles.stride(), angles.storage_offset(), lasting._version
        # The shape of the rotated tensor decides which backends support it.
        key = place, scale, layout, like.dtype, like.device, like.shape[:-1]
        if key not in tables:
            if len(tables) >= _MOST:
                tables.clear()
            with torch.inference_mode(False):  # tables cached by an evaluation are used in training, too
                tables[key] = rotation(angles, scale, layout, like)
        table: Rotation = tables[key]
        return table


def rotate_fused(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``_apply_rotary_pos_emb_bshd``: call the fused operator.

    The fourth argument, which selects latent attention's order of dimensions, has different names in
    different Megatron releases.
    """
    rotations = _Rotations()

    def _apply_rotary_pos_emb_bshd(
        t: Tensor, freqs: Tensor, rotary_interleaved: bool = False, *args: Any, **kwargs: Any
    ) -> Tensor:
        latent, mscale, more = _other_arguments(args, kwargs)
        # Left to Megatron: compiled code, which is fused anyway, learned angles, MLA's order together with
        # interleaved pairs, and arguments of later releases.
        if torch.compiler.is_compiling() or freqs.requires_grad or (latent and rotary_interleaved) or more:
            return original(t, freqs, rotary_interleaved, *args, **kwargs)
        layout: Layout = "pairs to halves" if latent else "pairs" if rotary_interleaved else "halves"
        return rotate(t, rotations.of(freqs, mscale, layout, t))

    return _apply_rotary_pos_emb_bshd


def _other_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, float, bool]:
    """Return (whether latent attention's order is used, mscale, whether any other argument is set)."""
    named = dict(kwargs)
    latent = args[0] if args else named.pop("mla_rotary_interleaved", False)
    if (older := named.pop("multi_latent_attention", None)) is not None:
        latent = older
    mscale = args[1] if len(args) > 1 else named.pop("mscale", 1.0)
    return bool(latent), float(mscale), any(args[2:]) or any(named.values())


# -- swiglu: Megatron's two functions, and the MLPs and experts that do not call them ----------------


def fuse_swiglu(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``bias_swiglu_impl``: call the fused operator."""

    def bias_swiglu_impl(input: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        if _asks_for_more(args, kwargs):
            return original(input, bias, *args, **kwargs)
        return swiglu(input, bias)

    return bias_swiglu_impl


def fuse_weighted_swiglu(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``weighted_bias_swiglu_impl``: call the fused operator; with a bias, Megatron raises."""

    def weighted_bias_swiglu_impl(
        input: Tensor, bias: Tensor | None, weights: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if bias is not None or _asks_for_more(args, kwargs):
            return original(input, bias, weights, *args, **kwargs)
        return swiglu(input, scale=weights)

    return weighted_bias_swiglu_impl


def _asks_for_more(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether arguments for FP8 storage, CPU offloading or clamping are set."""
    return any(value is not None and value is not False for value in (*args, *kwargs.values()))


def fuse_in_mlp(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MLP.forward`` to set ``bias_activation_fusion``, so that it calls the patched SwiGLU."""

    def forward(
        self: Any, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> Any:
        config = self.config
        if config.bias_activation_fusion or not is_plain_swiglu(self, config):
            return original(self, hidden_states, per_token_scale, **kwargs)
        if per_token_scale is not None and config.add_bias_linear:  # Megatron's fused function refuses both
            return original(self, hidden_states, per_token_scale, **kwargs)
        fusing = AttributeOverride(config, bias_activation_fusion=True, activation_func_fp8_input_store=False)
        return original(AttributeOverride(self, config=fusing), hidden_states, per_token_scale, **kwargs)

    return forward


def is_plain_swiglu(mlp: Any, config: Any) -> bool:
    """Return whether the activation is plain SwiGLU, without clamp, offset or activation module."""
    return (
        mlp.activation_func is F.silu
        and config.gated_linear_unit
        and not getattr(config, "use_te_activation_func", False)
        and getattr(config, "activation_func_clamp_value", None) is None
        and not getattr(config, "glu_linear_offset", 0)
    )


def activate_together(original: Callable[..., Any], context: Context[SwigluOptions]) -> Callable[..., Any]:
    """Decorate ``SequentialMLP.forward``: replace the local experts by one expert for all tokens.

    The linear layers of this expert multiply each token with the weight of the token's own expert. Everything
    else is Megatron's code, so the activation runs once for all experts.
    """

    def forward(self: Any, rows: Tensor, tokens_per_expert: Any, probs: Tensor) -> Any:
        if context.options.apart or not _can_be_one(self, context.megatron):
            return original(self, rows, tokens_per_expert, probs)
        experts, counts = self.local_experts, tokens_per_expert.tolist()
        first = experts[0]
        joint = AttributeOverride(
            first,
            linear_fc1=_of_each([each.linear_fc1 for each in experts], counts, context.megatron),
            linear_fc2=_of_each([each.linear_fc2 for each in experts], counts, context.megatron),
        )
        one = partial(type(first).forward, joint)
        as_one = AttributeOverride(self, num_local_experts=1, local_experts=[one])
        return original(as_one, rows, tokens_per_expert, probs)

    return forward


def _of_each(linears: Sequence[Any], counts: list[int], megatron: Megatron) -> Function:
    """Build one linear layer for all experts: a grouped matmul if possible, else one call per expert."""

    def products(rows: Tensor) -> tuple[Tensor, None]:
        plain = linears_of(linears, megatron)
        if plain is None or torch.is_autocast_enabled(rows.device.type) or plain[0].dtype != rows.dtype:
            parts = rows.split(counts)
            return torch.cat([linear(part)[0] for linear, part in zip(linears, parts, strict=True)]), None
        return multiply_apart(rows, plain, counts), None

    return Function(products)


def _can_be_one(experts: Any, megatron: Megatron) -> bool:
    """Return whether all experts compute plain SwiGLU, and differ only in their linear layers."""
    config = experts.config
    if experts.num_local_experts == 1 or config.add_bias_linear:
        return False
    if getattr(config, "fp8", None) or getattr(config, "fp4", None):  # both pad each expert's tokens
        return False
    mlp = megatron("core.transformer.mlp").MLP  # a subclass may have parts that differ between experts
    return all(
        type(each) is mlp and is_plain_swiglu(each, config) and not _has_hooks(each)
        for each in experts.local_experts
    )


def _has_hooks(expert: Any) -> bool:
    return bool(
        expert._forward_hooks
        or expert._backward_hooks
        or expert._backward_pre_hooks
        or "forward" in vars(expert)
        or not all(map(waits_for_weights, expert._forward_pre_hooks.values()))
    )
