"""Zero gradients for parameters that a step does not train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _ZeroGradients(torch.autograd.Function):
    """Identity on the output; in backward the parameters get gradients that are exactly zero."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        return grad_output, *(torch.zeros_like(parameter) for parameter in ctx.parameters)


def with_zero_gradients(output: Tensor, module: torch.nn.Module) -> Tensor:
    """``output``, through which the module's trainable parameters get zero gradients.

    Megatron's overlapped gradient reduction starts a bucket when all its parameters have a gradient; a
    parameter without a gradient would make the step fail.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return _ZeroGradients.apply(output, *parameters) if parameters else output
