"""Rotary position embedding: rotates pairs of a head's dimensions by position-dependent angles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops.backend import ShapeClass, choose, count_call, plan, unless_empty
from mindspeed_dsa.ops.checks import require
from mindspeed_dsa.ops.rotary.backends import Layout, Rotator

__all__ = ["OPERATOR", "Layout", "Rotation", "rotate", "rotation", "rotation_by"]

OPERATOR = "rotary"


@dataclass(frozen=True)
class Rotation:
    """Rotation tables and backend for tensors of one dtype, shared by query and key.

    Attributes:
        implementation: backend that applies the rotation.
        width: number of leading dimensions of a head that are rotated.
        layout: positions of the two coordinates of a pair.
        cos, sin: tables from :meth:`Rotator.tables`, broadcast against the rotated dimensions.
        backward_sin: table of sines for the inverse rotation.
    """

    implementation: Rotator
    width: int
    layout: Layout
    cos: Tensor
    sin: Tensor
    backward_sin: Tensor


def rotation(angles: Tensor, scale: float, layout: Layout, like: Tensor, backend: str = "auto") -> Rotation:
    """Select a backend and build the tables for rotating tensors with the shape and dtype of ``like``.

    Args:
        angles: ``[rows, ..., width]``, broadcast against the leading dimensions of the heads of ``like``.
            Each angle occurs twice, once for each dimension of its pair.
        scale: factor of cosines and sines, YaRN's ``mscale``.
        layout: positions of a pair's coordinates, see :data:`mindspeed_dsa.ops.rotary.backends.Layout`.
        like: ``[rows, batch, heads, dim]``, tensor with the shape and dtype of the tensors to rotate.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Raises:
        ValueError: a shape does not fit.
        BackendUnavailable: the requested backend cannot take the call.
    """
    # Rounded to the dtype of the tensors, as in Megatron.
    cos, sin = (
        (part * scale if scale != 1 else part).to(like.dtype) for part in (angles.cos(), angles.sin())
    )
    return rotation_by(cos, sin, scale, layout, like, backend)


def rotation_by(
    cos: Tensor, sin: Tensor, scale: float, layout: Layout, like: Tensor, backend: str = "auto"
) -> Rotation:
    """Select a backend for rotating by given cosines and sines, as :func:`rotation` does for angles.

    Args:
        cos: ``[rows, ..., width]`` in the dtype of ``like``, multiplied by ``scale``. Each value occurs
            twice, once for each dimension of its pair.
        sin: sines, in the same way.
        scale: factor that cosines and sines are multiplied by.
        layout: positions of a pair's coordinates, see :data:`mindspeed_dsa.ops.rotary.backends.Layout`.
        like: ``[rows, batch, heads, dim]``, tensor with the shape and dtype of the tensors to rotate.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.
    """
    width = cos.shape[-1]
    require(
        width % 2 == 0 and width <= like.shape[-1],
        OPERATOR,
        f"an even number of dimensions is rotated, of {like.shape[-1]} at most; got {width}",
    )
    selected: Rotator = choose(OPERATOR, backend, ShapeClass.of(like, ("dim", width)))
    selected = unless_empty(OPERATOR, selected, like)
    implementation, _ = plan(OPERATOR, backend, selected, selected.plan(like, cos, scale, layout))
    return Rotation(implementation, width, layout, *implementation.tables(cos, sin, layout))


def rotate(tensor: Tensor, by: Rotation) -> Tensor:
    """Rotate the leading dimensions of every head; the other dimensions are unchanged.

    Only the tables are saved for backward.

    Args:
        tensor: ``[rows, batch, heads, dim]`` in the dtype of the tables.
        by: rotation from :func:`rotation` for such tensors.

    Returns:
        Rotated tensor of the same shape and dtype.
    """
    count_call(OPERATOR, by.implementation)
    if tensor.shape[-1] == by.width:
        return _Rotate.apply(tensor, by)
    turned, passed = tensor.split((by.width, tensor.shape[-1] - by.width), -1)
    return torch.cat((_Rotate.apply(turned, by), passed), -1)  # [rows, batch, heads, dim]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, by: Rotation) -> Tensor:
        ctx.implementation, ctx.layout = by.implementation, by.layout
        ctx.save_for_backward(by.cos, by.backward_sin)
        return by.implementation.forward(tensor, by.cos, by.sin, by.layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.implementation.backward(grad, *ctx.saved_tensors, ctx.layout), None
