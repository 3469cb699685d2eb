"""Rotary position embedding: pairs of dimensions of every head, rotated by the angles of their row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops.backend import ShapeClass, choose, count_call, plan, unless_empty
from mindspeed_dsa.ops.checks import require
from mindspeed_dsa.ops.rotary.backends import Layout, Rotator

__all__ = ["OPERATOR", "Layout", "Rotation", "rotate", "rotation"]

OPERATOR = "rotary"


@dataclass(frozen=True)
class Rotation:
    """Rotation of every row, to be applied to tensors of one dtype.

    Attributes:
        implementation: what applies it.
        width: how many of a head's first dimensions it rotates.
        layout: which of them are the two coordinates of a pair.
        cos, sin: as :meth:`Rotator.tables` made them, broadcast against the rotated dimensions.
        backward_sin: the same for the inverse.
    """

    implementation: Rotator
    width: int
    layout: Layout
    cos: Tensor
    sin: Tensor
    backward_sin: Tensor


def rotation(angles: Tensor, scale: float, layout: Layout, like: Tensor, backend: str = "auto") -> Rotation:
    """Return tables for rotating tensors like ``like``, to be used for all of them.

    Args:
        angles: ``[rows, ..., width]``, broadcast against the first dimensions of the heads of ``like``; each
            stands twice, once for either dimension of its pair.
        scale: what lengths are multiplied by, YaRN's ``mscale``.
        layout: see :data:`mindspeed_dsa.ops.rotary.backends.Layout`.
        like: ``[rows, batch, heads, dim]``.
        backend: see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Raises:
        ValueError: a shape does not fit.
        BackendUnavailable: the backend asked for cannot take the call.
    """
    width = angles.shape[-1]
    require(
        width % 2 == 0 and width <= like.shape[-1],
        OPERATOR,
        f"an even number of dimensions is rotated, of {like.shape[-1]} at most; got {width}",
    )
    chosen: Rotator = choose(OPERATOR, backend, ShapeClass.of(like, ("dim", width)))
    chosen = unless_empty(OPERATOR, chosen, like)
    implementation, _ = plan(OPERATOR, backend, chosen, chosen.plan(like, angles, scale, layout))
    # As Megatron rounds them.
    cos, sin = (
        (part * scale if scale != 1 else part).to(like.dtype) for part in (angles.cos(), angles.sin())
    )
    return Rotation(implementation, width, layout, *implementation.tables(cos, sin, layout))


def rotate(tensor: Tensor, by: Rotation) -> Tensor:
    """Rotate the first dimensions of every head; the others are passed on.

    Backward keeps the tables alone.

    Args:
        tensor: ``[rows, batch, heads, dim]`` in the dtype of the tables.
        by: what :func:`rotation` made for such a tensor.

    Returns:
        The same shape and dtype.
    """
    count_call(OPERATOR, by.implementation)
    if tensor.shape[-1] == by.width:
        return _Rotate.apply(tensor, by)
    turned, passed = tensor.split((by.width, tensor.shape[-1] - by.width), -1)
    return torch.cat((_Rotate.apply(turned, by), passed), -1)


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
