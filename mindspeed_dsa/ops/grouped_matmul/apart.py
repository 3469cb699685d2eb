"""Products of groups of rows whose weights are parameters of their own, as one node of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def multiply_apart(rows: Tensor, weights: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Each group's rows times the transpose of its weight, with the bits of one linear layer for each.

    Args:
        rows: ``[rows, in]``, sorted by group.
        weights: ``[out, in]`` of each group, in the rows' dtype.
        sizes: rows of each group.

    Returns:
        ``[rows, out]``.
    """
    output: Tensor = _Apart.apply(tuple(sizes), rows, *weights)
    return output


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sizes: tuple[int, ...], rows: Tensor, *weights: Tensor) -> Tensor:
        ctx.sizes = sizes
        ctx.save_for_backward(rows, *weights)
        output = rows.new_empty(rows.shape[0], weights[0].shape[0])
        for part, weight, product in zip(rows.split(sizes), weights, output.split(sizes), strict=True):
            torch.mm(part, weight.t(), out=product)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        rows, *weights = ctx.saved_tensors
        grads = grad_output.contiguous().split(ctx.sizes)
        grad_rows = None
        if ctx.needs_input_grad[1]:
            grad_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
            for grad, weight, product in zip(grads, weights, grad_rows.split(ctx.sizes), strict=True):
                torch.mm(grad, weight, out=product)
        grad_weights = [
            grad.t().mm(part) if needed else None
            for grad, part, needed in zip(grads, rows.split(ctx.sizes), ctx.needs_input_grad[2:], strict=True)
        ]
        return None, grad_rows, *grad_weights
