"""Rotation in plain PyTorch, as the formula has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.rotary.layouts import Layout, to_halves, to_pairs


def unsupported(shape: ShapeClass) -> str | None:
    """None: the reference takes every shape."""
    return None


def plan(like: Tensor, angles: Tensor, scale: float, layout: Layout) -> Any:
    """None: the reference takes every call."""


def tables(cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines, and sines of both directions."""
    return cos, sin, sin


def forward(tensor: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """The rotated tensor."""
    if layout == "pairs to halves":
        tensor = to_halves(tensor)
    return tensor * cos + _turned(tensor, layout) * sin


def backward(grad: Tensor, cos: Tensor, backward_sin: Tensor, layout: Layout) -> Tensor:
    """The gradient of the tensor; a quarter turn's transpose is the turn the other way."""
    found = grad * cos - _turned(grad * backward_sin, layout)
    return to_pairs(found) if layout == "pairs to halves" else found


def _turned(tensor: Tensor, layout: Layout) -> Tensor:
    """Every pair ``(x, y)`` turned to ``(-y, x)``."""
    if layout == "pairs":
        return torch.stack((-tensor[..., 1::2], tensor[..., 0::2]), -1).flatten(-2)
    first, second = tensor.chunk(2, -1)
    return torch.cat((-second, first), -1)
