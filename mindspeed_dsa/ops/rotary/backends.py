"""Backends of the rotation: a reference, a version with few operations for CPUs and GPUs, and torch_npu."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import Backend, ShapeClass
from mindspeed_dsa.ops.npu.device import npu_op, unavailable

Layout = Literal["halves", "pairs", "pairs to halves"]
"""Positions of the two coordinates of a pair.

``halves``: dimensions ``i`` and ``i + width / 2``. ``pairs``: neighbors, ``2 i`` and ``2 i + 1``. ``pairs to
halves``: neighbors before the rotation and opposite after it, as in DeepSeek's latent attention.
"""

_ROTATE = "npu_rotary_mul"
# Sizes at and above these are excluded by the operator's manual.
_DIM, _BATCH_OR_HEADS = 896, 1000


class Rotator(Backend):
    """Backend of the rotation; the last axis of all arguments has only the rotated dimensions."""

    def plan(self, like: Tensor, angles: Tensor, scale: float, layout: Layout) -> str | None:
        """Return why the backend cannot take a call, or None: see :func:`mindspeed_dsa.ops.backend.plan`."""
        return None

    @abstractmethod
    def tables(self, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cosine table, the sine table for forward, and the sine table for backward."""

    @abstractmethod
    def forward(self, tensor: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        """Return the rotated tensor, which shares no memory with ``tensor``."""

    @abstractmethod
    def backward(self, grad: Tensor, cos: Tensor, backward_sin: Tensor, layout: Layout) -> Tensor:
        """Return the gradient of ``tensor``, by the inverse rotation."""


class Reference(Rotator):
    """Backend that computes the rotation formula in plain PyTorch."""

    def tables(self, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        return cos, sin, sin

    def forward(self, tensor: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        if layout == "pairs to halves":
            tensor = _to_halves(tensor)
        return tensor * cos + _turned(tensor, layout) * sin

    def backward(self, grad: Tensor, cos: Tensor, backward_sin: Tensor, layout: Layout) -> Tensor:
        # The transpose of a quarter turn is the turn in the other direction.
        gradient = grad * cos - _turned(grad * backward_sin, layout)
        return _to_pairs(gradient) if layout == "pairs to halves" else gradient


def _turned(tensor: Tensor, layout: Layout) -> Tensor:
    """Rotate every pair ``(x, y)`` by 90 degrees to ``(-y, x)``."""
    if layout == "pairs":
        return torch.stack((-tensor[..., 1::2], tensor[..., 0::2]), -1).flatten(-2)  # [..., width]
    first, second = tensor.chunk(2, -1)  # [..., width / 2] each
    return torch.cat((-second, first), -1)  # [..., width]


def _to_halves(pairs: Tensor) -> Tensor:
    """Reorder ``[..., (x0, y0, x1, y1, ...)]`` to ``[..., (x0, x1, ..., y0, y1, ...)]``."""
    return torch.cat((pairs[..., 0::2], pairs[..., 1::2]), -1)


def _to_pairs(halves: Tensor) -> Tensor:
    """Invert :func:`_to_halves`."""
    return torch.stack(halves.chunk(2, -1), -1).flatten(-2)


class Cpu(Rotator):
    """Backend with few PyTorch operations: it swaps coordinates, as the sine table includes the signs."""

    def tables(self, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        # In both directions the sine is negative for the first coordinate of a pair.
        if layout == "pairs":
            signed = torch.stack((-sin[..., 0::2], sin[..., 1::2]), -1).flatten(-2)  # [..., width]
        else:
            first, second = sin.chunk(2, -1)  # [..., width / 2] each
            signed = torch.cat((-first, second), -1)  # [..., width]
        if layout == "pairs to halves":  # [..., 2, width / 2]: first coordinates, then second coordinates
            cos, signed = cos.unflatten(-1, (2, -1)), signed.unflatten(-1, (2, -1))
        return cos, signed, signed

    def forward(self, tensor: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        # Bit for bit the formula's sum of two products.
        if layout == "pairs to halves":
            halves = tensor.unflatten(-1, (-1, 2)).transpose(-1, -2)  # [..., 2, width / 2]
            output = tensor.new_empty(halves.shape)
            torch.mul(halves, cos, out=output)
            return output.add_(halves.flip(-2).mul_(sin)).flatten(-2)  # [..., width]
        return _swapped(tensor, layout).mul_(sin).add_(tensor * cos)

    def backward(self, grad: Tensor, cos: Tensor, backward_sin: Tensor, layout: Layout) -> Tensor:
        if layout == "pairs to halves":
            halves = grad.unflatten(-1, (2, -1))  # [..., 2, width / 2]
            # [..., width / 2, 2], the result
            pairs = grad.new_empty((*halves.shape[:-2], halves.shape[-1], 2))
            output = pairs.transpose(-1, -2)  # [..., 2, width / 2], a view
            torch.mul(halves, cos, out=output)
            output.add_((halves * backward_sin).flip(-2))
            return pairs.flatten(-2)  # [..., width]
        return _swapped(grad * backward_sin, layout).add_(grad * cos)


def _swapped(tensor: Tensor, layout: Layout) -> Tensor:
    """Swap the two coordinates of every pair."""
    if layout == "pairs":
        return tensor.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)  # [..., width / 2, 2] -> [..., width]
    return tensor.roll(tensor.shape[-1] // 2, -1)


class Cuda(Cpu):
    """Backend that runs the CPU backend's PyTorch operations on NVIDIA GPUs.

    Liger-Kernel is not used: its kernel rotates query and key together, in place, but Megatron passes one
    tensor at a time.
    """


class Npu(Rotator):
    """Backend that calls torch_npu's rotary operator; backward calls it with negated angles."""

    def unsupported(self, shape: ShapeClass) -> str | None:
        if shape.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{_ROTATE} takes fp32, bf16 and fp16"
        if shape["dim"] >= _DIM:
            return f"{_ROTATE} rotates fewer than {_DIM} dimensions"
        return unavailable(shape.device, _ROTATE)

    def plan(self, like: Tensor, angles: Tensor, scale: float, layout: Layout) -> str | None:
        if like.dim() != 4 or angles.dim() != 4:
            return (
                f"{_ROTATE} takes [rows, batch, heads, dim], not {list(like.shape)} by {list(angles.shape)}"
            )
        rows, batch, heads, _ = like.shape
        if scale > 1:
            return f"{_ROTATE} takes sines and cosines of up to 1, and these are multiplied by {scale:.3g}"
        if max(batch, heads) >= _BATCH_OR_HEADS or (layout == "pairs" and batch * heads >= _BATCH_OR_HEADS):
            return (
                f"{_ROTATE} takes fewer than {_BATCH_OR_HEADS} sequences and heads, not {batch} and {heads}"
            )
        by_sequence = (rows, 1, 1) if layout == "pairs" else (rows, batch, 1)
        if angles.shape[:3] not in ((rows, 1, 1), by_sequence):
            return f"{_ROTATE} takes angles by row, not {list(angles.shape)}"
        return None

    def tables(self, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        # sin(-a) = -sin(a): the inverse rotation needs only the negative sines, for both dimensions of a
        # pair.
        return cos, sin, -sin

    def forward(self, tensor: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        if layout == "pairs to halves":
            tensor = _to_halves(tensor)
        mode = "interleave" if layout == "pairs" else "half"
        rotated: Tensor = npu_op(_ROTATE)(tensor, cos, sin, rotary_mode=mode)
        return rotated

    def backward(self, grad: Tensor, cos: Tensor, backward_sin: Tensor, layout: Layout) -> Tensor:
        if layout == "pairs to halves":
            return _to_pairs(self.forward(grad, cos, backward_sin, "halves"))
        return self.forward(grad, cos, backward_sin, layout)
