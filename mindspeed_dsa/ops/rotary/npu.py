"""Rotation on Ascend NPUs: torch_npu's operator, forward by an angle and backward by its negative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.npu.device import npu_op, unavailable
from mindspeed_dsa.ops.rotary.layouts import Layout, to_halves, to_pairs

_ROTATE = "npu_rotary_mul"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Sizes that its manual excludes.
_DIM, _BATCH_OR_HEADS = 896, 1000


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
    if shape.dtype not in _DTYPES:
        return f"{_ROTATE} takes fp32, bf16 and fp16"
    if shape["dim"] >= _DIM:
        return f"{_ROTATE} rotates fewer than {_DIM} dimensions"
    return unavailable(shape.device, _ROTATE)


def plan(like: Tensor, angles: Tensor, scale: float, layout: Layout) -> Any:
    """Why torch_npu's operator cannot take this call, or None."""
    if like.dim() != 4 or angles.dim() != 4:
        return f"{_ROTATE} takes [rows, batch, heads, dim], not {list(like.shape)} by {list(angles.shape)}"
    rows, batch, heads, _ = like.shape
    if scale > 1:
        return f"{_ROTATE} takes sines and cosines of up to 1, and these are multiplied by {scale:.3g}"
    if max(batch, heads) >= _BATCH_OR_HEADS or (layout == "pairs" and batch * heads >= _BATCH_OR_HEADS):
        return f"{_ROTATE} takes fewer than {_BATCH_OR_HEADS} sequences and heads, not {batch} and {heads}"
    own_angles = (rows, 1, 1) if layout == "pairs" else (rows, batch, 1)
    if angles.shape[:3] not in ((rows, 1, 1), own_angles):
        return f"{_ROTATE} takes angles by row, not {list(angles.shape)}"
    return None


def tables(cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines, sines, and the sines of the negative angles: both dimensions of a pair have the same."""
    return cos, sin, -sin


def forward(tensor: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """The rotated tensor."""
    if layout == "pairs to halves":
        tensor = to_halves(tensor)
    return npu_op(_ROTATE)(tensor, cos, sin, rotary_mode="interleave" if layout == "pairs" else "half")


def backward(grad: Tensor, cos: Tensor, backward_sin: Tensor, layout: Layout) -> Tensor:
    """The gradient of the tensor."""
    if layout == "pairs to halves":
        return to_pairs(forward(grad, cos, backward_sin, "halves"))
    return forward(grad, cos, backward_sin, layout)
