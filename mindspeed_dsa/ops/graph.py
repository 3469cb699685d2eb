"""Autograd edges with zero gradients, which attach a layer's indexer loss to the layer's output.

When only indexers are trained, no gradient flows from layer to layer. If the losses were summed separately,
backward would skip the hooks on layer outputs that activation checkpointing, pipeline stages and FSDP rely
on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def with_backward_of(value: Tensor, *others: Tensor) -> Tensor:
    """Return ``value``; its backward also runs the backward of ``others``, with zero gradients.

    Args:
        value: any tensor. Its gradient is the result's gradient, and the result shares its memory.
        *others: tensors, at least one of which requires a gradient. None of them is saved.
    """
    return _WithBackwardOf.apply(value, *others)


def passes_no_gradient(tensor: Tensor) -> bool:
    """Return whether a tensor requires grad only because of :func:`with_backward_of`.

    The search walks back through graph nodes with one differentiable input, such as hooks and casts that
    wrappers insert between layers, or a sum with a tensor that requires no gradient.
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
        # Scalars are enough: backward expands them to the full shape without memory.
        ctx.zeros = [(other.new_zeros(()), other.shape) for other in others]
        setattr(ctx, _MARK, ctx.needs_input_grad[0])
        return value.detach()  # FSDP2 warns about outputs that are views

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(zero.expand(shape) for zero, shape in ctx.zeros)
