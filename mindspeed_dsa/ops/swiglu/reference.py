"""SwiGLU in plain PyTorch, by autograd."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass

KIND: Literal["autograd"] = "autograd"


def unsupported(shape: ShapeClass) -> str | None:
    """None: the reference takes every shape."""
    return None


def swiglu(gate_up: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """``[..., ffn]``."""
    gate, up = (gate_up if bias is None else gate_up + bias).chunk(2, -1)
    output = F.silu(gate) * up
    return output if scale is None else (output * scale).to(output.dtype)
