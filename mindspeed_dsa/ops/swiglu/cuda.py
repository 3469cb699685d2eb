"""SwiGLU on NVIDIA GPUs: Liger-Kernel's kernels for rows that hold both halves."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from mindspeed_dsa.ops import liger
from mindspeed_dsa.ops.backend import ShapeClass

KIND: Literal["gradients"] = "gradients"


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
    return liger.unavailable(shape, shape["ffn"])


def forward(gate_up: Tensor) -> Tensor:
    """``[..., ffn]``."""
    return liger.kernels("swiglu").swiglu_fused_gate_up_forward(gate_up.contiguous())[1]


def backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of ``gate_up``."""
    kernel = liger.kernels("swiglu").swiglu_fused_gate_up_backward
    return kernel(gate_up.contiguous(), grad.contiguous()).view(gate_up.shape)
