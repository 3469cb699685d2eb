"""An activation that every tensor parallel rank uses for its own heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, contiguous_format
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, all_reduce


class SumGradients(Function):
    """Identity; in backward the sum over a group.

    Megatron's ``copy_to_tensor_model_parallel_region`` reduces a contiguous copy and returns the original,
    so that the sum is lost for a gradient that is a slice of a larger one, as it is here.
    """

    @staticmethod
    def forward(ctx: Any, activation: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return activation

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=contiguous_format)
        all_reduce(gradient, group=ctx.group)
        return gradient, None
