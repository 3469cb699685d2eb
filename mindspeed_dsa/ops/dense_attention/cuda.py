"""Dense attention on NVIDIA GPUs: the flash attention that PyTorch is built with."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.dense_attention.heads import padded

_OPERATORS = ("_flash_attention_forward", "_flash_attention_backward")
_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
# Heads are made of so many numbers, or of zeros up to there.
_UNIT = 8


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
    if shape.device != "cuda":
        return "it runs on CUDA tensors only"
    if not all(hasattr(torch.ops.aten, name) for name in _OPERATORS):
        return "this torch has no flash attention under the name that is called here"
    if shape.dtype not in _DTYPES:
        return "flash attention takes bfloat16 and float16 only"
    if max(shape["dim"], shape["value_dim"]) > _LARGEST_HEAD:
        return f"flash attention takes heads of at most {_LARGEST_HEAD} dimensions"
    return None


def forward(
    query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """See the protocol."""
    operands = padded(_size(query, value), query, key, value)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *operands, None, None, query.shape[1], key.shape[1], 0.0, causal, False, scale=softmax_scale
    )
    return out[..., : value.shape[3]], lse.transpose(1, 2)


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
    grad_out, query_, key_, value_, out = padded(_size(query, value), grad_out, query, key, value, out)
    # Without dropout nobody reads the state of the random numbers.
    state = torch.zeros(2, dtype=torch.int64, device=query.device)
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        grad_out.contiguous(),
        query_,
        key_,
        value_,
        out.contiguous(),
        lse.transpose(1, 2).contiguous(),
        None,
        None,
        query.shape[1],
        key.shape[1],
        0.0,
        causal,
        state,
        state,
        scale=softmax_scale,
    )
    return (
        grad_query[..., : query.shape[3]],
        grad_key[..., : key.shape[3]],
        grad_value[..., : value.shape[3]],
    )


def _size(query: Tensor, value: Tensor) -> int:
    """Of the heads that the kernel gets."""
    size = max(query.shape[3], value.shape[3])
    return size + -size % _UNIT
