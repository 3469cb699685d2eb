"""RMSNorm on Ascend NPUs: torch_npu's operators."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.npu.device import npu_op, product, unavailable
from mindspeed_dsa.platforms.npu_operators import PRODUCTS

KIND: Literal["gradients"] = "gradients"
_NORM = "npu_rms_norm"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
    if shape.dtype not in _DTYPES:
        return f"{_NORM} takes fp32, bf16 and fp16"
    return unavailable(shape.device, _NORM, f"{_NORM}_backward")


def plan(hidden: Tensor, weight: Tensor) -> Any:
    """Why torch_npu's operator cannot take this call, or None."""
    if weight.dtype not in (hidden.dtype, torch.float32):
        return (
            f"{_NORM} takes a weight of its input's dtype or in fp32, not {weight.dtype} with {hidden.dtype}"
        )
    # Wider weights: --init-norm-weight-in-fp32 of MindSpeed-LLM.
    if weight.dtype != hidden.dtype and not product().norm_weight_in_fp32:
        where = " and ".join(each.name for each in PRODUCTS if each.norm_weight_in_fp32)
        return (
            f"{_NORM} takes a weight in fp32 beside {hidden.dtype} on {where} only; this is {product().name}"
        )
    if not 2 <= hidden.dim() <= 8:
        return f"{_NORM} takes 2 to 8 axes, not {hidden.dim()}"
    return None


def forward(hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``[..., n]``, and ``[..., 1]`` what each row was multiplied by."""
    output, rstd = npu_op(_NORM)(hidden, weight, epsilon=eps)
    return output.to(hidden.dtype), rstd  # the manual does not say which type a wider weight gives


def backward(grad: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``hidden`` and of ``weight``."""
    grad_hidden, grad_weight = npu_op(f"{_NORM}_backward")(grad, hidden, weight, rstd)
    return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype)
