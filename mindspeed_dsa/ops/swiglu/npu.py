"""SwiGLU on Ascend NPUs: torch_npu's operators."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.npu.device import npu_op, unavailable

KIND: Literal["gradients"] = "gradients"
_SWIGLU = "npu_swiglu"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
    if shape.dtype not in _DTYPES:
        return f"{_SWIGLU} takes fp32, bf16 and fp16"
    return unavailable(shape.device, _SWIGLU, f"{_SWIGLU}_backward")


def forward(gate_up: Tensor) -> Tensor:
    """``[..., ffn]``."""
    return npu_op(_SWIGLU)(gate_up, dim=-1)


def backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of ``gate_up``, whose dtype the operator wants of the arriving gradient too."""
    return npu_op(f"{_SWIGLU}_backward")(grad.to(gate_up.dtype), gate_up, dim=-1)
