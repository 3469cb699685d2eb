"""Grouped matmul in plain PyTorch: one product after another, in fp32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.grouped_matmul.groups import Groups


def unsupported(shape: ShapeClass) -> str | None:
    """None: the reference takes every shape."""
    return None


def multiply(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """``[rows, in]`` and ``[groups, in, out]`` to ``[rows, out]``."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    parts = rows.to(dtype).split(groups.sizes)
    products = [part @ matrix.to(dtype) for part, matrix in zip(parts, weight, strict=True)]
    return torch.cat(products).to(rows.dtype)


def weight_gradient(
    rows: Tensor, grad_output: Tensor, groups: Groups, into: Tensor, accumulate: bool
) -> None:
    """``rows.T @ grad_output`` of each group, added to ``into`` or written to it."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    parts = rows.to(dtype).split(groups.sizes), grad_output.to(dtype).split(groups.sizes)
    for matrix, part, grad in zip(into, *parts, strict=True):
        product = part.T @ grad
        matrix.copy_(matrix + product if accumulate else product)
