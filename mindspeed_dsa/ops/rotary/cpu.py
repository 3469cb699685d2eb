"""Rotation in few operations: signs are part of the table of sines, so coordinates only change places."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.rotary.layouts import Layout


def unsupported(shape: ShapeClass) -> str | None:
    """None: PyTorch's operations take every shape."""
    return None


def plan(like: Tensor, angles: Tensor, scale: float, layout: Layout) -> Any:
    """None: PyTorch's operations take every call."""


def tables(cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines, and for both directions sines that are negative for the first coordinate of a pair."""
    if layout == "pairs":
        signed = torch.stack((-sin[..., 0::2], sin[..., 1::2]), -1).flatten(-2)
    else:
        first, second = sin.chunk(2, -1)
        signed = torch.cat((-first, second), -1)
    if layout == "pairs to halves":  # [..., 2, width / 2]: first coordinates, second ones
        cos, signed = cos.unflatten(-1, (2, -1)), signed.unflatten(-1, (2, -1))
    return cos, signed, signed


def forward(tensor: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """The rotated tensor, bit for bit the sum of the two products that the formula has."""
    if layout == "pairs to halves":
        halves = tensor.unflatten(-1, (-1, 2)).transpose(-1, -2)
        output = tensor.new_empty(halves.shape)
        torch.mul(halves, cos, out=output)
        return output.add_(halves.flip(-2).mul_(sin)).flatten(-2)
    return _swapped(tensor, layout).mul_(sin).add_(tensor * cos)


def backward(grad: Tensor, cos: Tensor, backward_sin: Tensor, layout: Layout) -> Tensor:
    """The gradient of the tensor."""
    if layout == "pairs to halves":
        halves = grad.unflatten(-1, (2, -1))
        found = grad.new_empty((*halves.shape[:-2], halves.shape[-1], 2))  # pairs, which autograd gets
        output = found.transpose(-1, -2)
        torch.mul(halves, cos, out=output)
        output.add_((halves * backward_sin).flip(-2))
        return found.flatten(-2)
    return _swapped(grad * backward_sin, layout).add_(grad * cos)


def _swapped(tensor: Tensor, layout: Layout) -> Tensor:
    """The coordinates of every pair, each in the other's place."""
    if layout == "pairs":
        return tensor.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return tensor.roll(tensor.shape[-1] // 2, -1)
