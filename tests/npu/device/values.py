"""CPU code of operators that torch has only on an NPU, or with other outputs there than on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.npu import dense_kernels, small_kernels

_runtime = ctypes.CDLL("libascendcl.so")


def _matmul_backward(grad: Tensor, a: Tensor, b: Tensor, mask: Sequence[bool]) -> tuple[Any, Any]:
    # A vector is a matrix of one row on the left, and of one column on the right.
    left, right = a[None] if a.dim() == 1 else a, b[:, None] if b.dim() == 1 else b
    out = grad[..., None, :] if a.dim() == 1 and b.dim() > 1 else grad
    out = out[..., None] if b.dim() == 1 else out
    out = out[None] if a.dim() == 1 and b.dim() == 1 else out
    grad_a = (out @ right.mT).sum_to_size(left.shape).view(a.shape) if mask[0] else None
    if not mask[1]:
        return grad_a, None
    if right.dim() == 2:  # one product over all rows, for example with the weight of a linear layer
        product = left.reshape(-1, left.shape[-1]).mT @ out.reshape(-1, out.shape[-1])
    else:
        product = (left.mT @ out).sum_to_size(right.shape)
    return grad_a, product.view(b.shape)


def _linear_backward(x: Tensor, grad: Tensor, weight: Tensor, mask: Sequence[bool]) -> tuple[Any, Any, Any]:
    rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return (
        grad @ weight if mask[0] else None,
        grads.t() @ rows if mask[1] else None,
        grads.sum(0) if mask[2] else None,
    )


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def _cast_backward(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.to(dtype)


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> tuple[Tensor, ...]:
    """Return mean and reciprocal deviation in fp32; a CPU has them in the input's dtype."""
    wide = [None if t is None else t.float() for t in (weight, bias)]
    out, mean, deviation = torch.native_layer_norm(x.float(), shape, *wide, eps)
    return out.to(x.dtype), mean, deviation


def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Any, mean: Tensor, rstd: Tensor, weight: Any, bias: Any, mask: Any
) -> tuple[Any, ...]:
    wide = [None if t is None else t.float() for t in (weight, bias)]
    gradients = torch.ops.aten.native_layer_norm_backward(
        grad.float(), x.float(), shape, mean.float(), rstd.float(), *wide, mask
    )
    # The device's operator returns gradients of weight and bias in fp32.
    return gradients[0].to(x.dtype) if mask[0] else None, *gradients[1:]


def _gather_backward(grad: Tensor, size: Any, dim: int, index: Tensor, sparse: bool) -> Tensor:
    return torch.zeros(size, dtype=grad.dtype).scatter_add(dim, index, grad)


def _dropout(x: Tensor, p: float, train: bool = True) -> tuple[Tensor, Tensor]:
    """Return the device's form of a mask: bits, in whole blocks of 16 bytes."""
    keep = torch.rand(x.shape) >= p if train else torch.ones(x.shape, dtype=torch.bool)
    blocks = (x.numel() + 127) // 128 * 128
    bits = torch.zeros(blocks, dtype=torch.uint8)
    bits[: x.numel()] = keep.flatten()
    # A byte has eight elements, the first one in its lowest bit.
    mask = (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
    return x * keep / (1 - p), mask


def _dropout_backward(grad: Tensor, mask: Tensor, p: float) -> Tensor:
    bits = (mask[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return grad * bits.flatten()[: grad.numel()].view(grad.shape) / (1 - p)


def _native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    return _dropout_backward(grad, mask, 1 - 1 / scale)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    return torch.histc(x.float(), bins, min, max).to(x.dtype)


# HCCL's numbers of dtypes.
_HCCL = {torch.float16: 3, torch.float32: 4, torch.bfloat16: 11}


def _all_gather_mm(
    rows: Tensor, other: Tensor, hcom: str, ranks: int, *, gather_output: bool = True, **unused: Any
) -> tuple[Tensor, Tensor]:
    own = rows.contiguous()
    whole = rows.new_empty((ranks * own.shape[0], own.shape[1]))
    _runtime.stand_in_all_gather(hcom.encode(), *_pointers(own, whole), ctypes.c_uint64(own.nbytes))
    return (whole.float() @ other.float()).to(rows.dtype), whole if gather_output else rows.new_empty(0)


def _mm_reduce_scatter(rows: Tensor, other: Tensor, hcom: str, ranks: int, **unused: Any) -> Tensor:
    product = (rows.float() @ other.float()).to(rows.dtype).contiguous()
    shard = product.new_empty((product.shape[0] // ranks, product.shape[1]))
    count = ctypes.c_uint64(shard.numel())
    _runtime.stand_in_sum_scatter(hcom.encode(), *_pointers(product, shard), count, _HCCL[shard.dtype])
    return shard


def _pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


BY_NAME: dict[str, Callable[..., Any]] = {
    "matmul_backward": _matmul_backward,
    "linear_backward": _linear_backward,
    "npu_dtype_cast": _cast,
    "_npu_dtype_cast": _cast,
    "npu_dtype_cast_backward": _cast_backward,
    "_npu_dtype_cast_backward": _cast_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "npu_gather_backward": _gather_backward,
    "native_dropout": _dropout,
    "_npu_dropout": _dropout,
    "native_dropout_backward": _native_dropout_backward,
    "npu_dropout_backward": _dropout_backward,
    "histc": _histc,
    "npu_all_gather_base_mm": _all_gather_mm,
    "npu_mm_reduce_scatter_base": _mm_reduce_scatter,
    "npu_fusion_attention_v3": dense_kernels.npu_fusion_attention_v3,
    "npu_fusion_attention_grad_v3": dense_kernels.npu_fusion_attention_grad_v3,
    "npu_apply_adam_w": small_kernels.npu_apply_adam_w,
}
