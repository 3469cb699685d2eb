"""Edges of the autograd graph that pass no gradient: losses of frozen layers leave by the layers' outputs.

Where only indexers are trained, no gradient flows from layer to layer. A loss that reached the end of the
model by a way of its own would leave out the backward hooks of outputs in between: checkpoints, pipeline
stages, weights that are gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def with_backward_of(value: Tensor, *others: Tensor) -> Tensor:
    """Return ``value``, whose backward runs that of other tensors too, with gradients of zeros.

    Args:
        value: any tensor; its gradient is what the result gets. The result shares its memory.
        *others: of which at least one requires a gradient. None of them is kept.
    """
    return _WithBackwardOf.apply(value, *others)


def passes_no_gradient(tensor: Tensor) -> bool:
    """Return whether a tensor requires a gradient only because of :func:`with_backward_of`.

    Operations of one such input, as wrappers of layers put between them (hooks, casts, a sum with a tensor
    that requires no gradient), are looked through.
    """
    node = tensor.grad_fn
    while node is not None and not hasattr(node, _MARK):
        inputs = [function for function, _ in node.next_functions if function is not None]
        node = inputs[0] if len(inputs) == 1 else None
    return node is not None and not getattr(node, _MARK)


_MARK = "passes_gradient"


class _WithBackwardOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        ctx.zeros = [(other.new_zeros(()), other.shape) for other in others]
        setattr(ctx, _MARK, ctx.needs_input_grad[0])
        return value.detach()  # FSDP2 warns of outputs that are views

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(zero.expand(shape) for zero, shape in ctx.zeros)
