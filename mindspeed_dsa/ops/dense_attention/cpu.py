"""Dense attention on CPUs: PyTorch's flash attention, which keeps the log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.dense_attention.heads import padded, repeated, summed

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_OPERATORS = (_FORWARD, f"{_FORWARD}_backward")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
    if shape.device != "cpu":
        return "it runs on CPU tensors only"
    if not all(hasattr(torch.ops.aten, name) for name in _OPERATORS):
        return "this torch has no flash attention for CPUs under the name that is called here"
    return None if shape.dtype in _DTYPES else f"PyTorch's flash attention does not take {shape.dtype}"


def forward(
    query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """See the protocol."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_operands(query, key, value), 0.0, causal, scale=softmax_scale
    )
    # [batch, heads, query_length, ...], in the strides of the other order
    return out.transpose(1, 2)[..., : value.shape[3]], lse.transpose(1, 2)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the protocol."""
    operands = _operands(query, key, value)
    size, kv_heads = operands[0].shape[-1], key.shape[2]
    grad_out, out = (states.transpose(1, 2) for states in padded(size, grad_out, out))
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, *operands, out, lse.transpose(1, 2), 0.0, causal, scale=softmax_scale
    )
    grad_query, grad_key, grad_value = (gradient.transpose(1, 2) for gradient in gradients)
    return (
        grad_query[..., : query.shape[3]],
        summed(grad_key[..., : key.shape[3]], kv_heads),
        summed(grad_value[..., : value.shape[3]], kv_heads),
    )


def _operands(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """``[batch, heads, length, size]`` each, heads and size equal."""
    heads, size = query.shape[2], max(query.shape[3], value.shape[3])
    states = padded(size, query, repeated(key, heads), repeated(value, heads))
    return tuple(one.transpose(1, 2) for one in states)
