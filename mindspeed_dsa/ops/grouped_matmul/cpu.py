"""Grouped matmul on CPU: one product per group, written where it belongs.

Torch's own ``grouped_mm`` is a loop too, needs widths of certain multiples, has no fp64, and cannot add to a
gradient that is there already; adding the gradient inside of the product is what makes this loop faster than
one linear layer for each group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.grouped_matmul.groups import Groups


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
    return None if shape.device == "cpu" else "it runs on CPU tensors only"


def multiply(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """``[rows, in]`` and ``[groups, in, out]`` to ``[rows, out]``."""
    result = rows.new_empty(rows.shape[0], weight.shape[2])
    parts, products = rows.split(groups.sizes), result.split(groups.sizes)
    for size, part, matrix, product in zip(groups.sizes, parts, weight.unbind(), products, strict=True):
        if size:
            torch.mm(part, matrix, out=product)
    return result


def weight_gradient(
    rows: Tensor, grad_output: Tensor, groups: Groups, into: Tensor, accumulate: bool
) -> None:
    """``rows.T @ grad_output`` of each group, added to ``into`` or written to it."""
    if into.stride(2) != 1:
        # (rows.T @ grad).T = grad.T @ rows: products come in the order in which they lie in memory.
        rows, grad_output, into = grad_output, rows, into.transpose(1, 2)
    parts = rows.split(groups.sizes), grad_output.split(groups.sizes)
    for size, matrix, part, grad in zip(groups.sizes, into.unbind(), *parts, strict=True):
        if not size:
            if not accumulate:
                matrix.zero_()
        elif matrix.dtype != part.dtype:
            product = torch.mm(part.T, grad)
            matrix.add_(product) if accumulate else matrix.copy_(product)
        elif accumulate:
            matrix.addmm_(part.T, grad)
        else:
            torch.mm(part.T, grad, out=matrix)
