"""SwiGLU on CPUs: few operations, and what they share in backward computed once."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass

KIND: Literal["gradients"] = "gradients"


def unsupported(shape: ShapeClass) -> str | None:
    """None: PyTorch's operations take every shape."""
    return None


def forward(gate_up: Tensor) -> Tensor:
    """``[..., ffn]``."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of ``gate_up``."""
    gate, up = gate_up.chunk(2, -1)
    grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
    return torch.cat((grad_gate, F.silu(gate) * grad), -1).to(gate_up.dtype)


def backward_of_scaled(grad: Tensor, gate_up: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``gate_up`` and of the factor of each row, all in one dtype."""
    gate, up = gate_up.chunk(2, -1)
    found = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    grad_gate, grad_up = found.chunk(2, -1)
    activated, grad_activated = F.silu(gate), grad * up
    torch.ops.aten.silu_backward.grad_input(grad_activated, gate, grad_input=grad_gate)
    torch.mul(activated, grad, out=grad_up)
    return found.mul_(scale), grad_activated.mul_(activated).sum(-1, keepdim=True)
