"""The linear layers of all local experts as one: one parameter, one operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.moe.grouped_experts.main_grad import gradient_receiver
from mindspeed_dsa.features.moe.grouped_experts.stacks import Stack
from mindspeed_dsa.ops.grouped_matmul import Groups, WeightGradient, grouped_matmul
from mindspeed_dsa.parallel.weight_gradients import DeferredGradient, Gradient, deferred_gradient_of


class GroupedLinear(torch.nn.Module):
    """Takes over the weights of the experts' layers, one expert after another.

    It neither gathers nor reduces: what experts get and return is the dispatcher's business, as it is for
    Megatron's layers with ``is_expert``.

    Args:
        linears: Megatron's layers, by local expert, without bias; they are left without weight.
        stack: says how the parameter ``weight`` lies, ``[experts, in, out]`` or ``[experts, out, in]``.
        megatron: whose conventions for gradients hold.

    Attributes:
        groups: rows of each expert in the calls to come; set by the experts around each.
    """

    def __init__(self, linears: Sequence[Any], stack: Stack, megatron: Megatron) -> None:
        super().__init__()
        self.layout, self._megatron = stack.layout, megatron
        self.by_expert, self.stack = stack.by_expert, stack.stack
        self.groups: Groups | None = None
        first = linears[0].weight
        shape = first.shape if self.layout == "nk" else first.shape[::-1]
        self.weight = Parameter(first.new_empty(len(linears), *shape), first.requires_grad)
        for name, value in vars(first).items():
            setattr(self.weight, name, value)
        if getattr(first, "partition_dim", -1) >= 0:
            of_matrix = first.partition_dim if self.layout == "nk" else 1 - first.partition_dim
            self.weight.partition_dim = 1 + of_matrix  # type: ignore[attr-defined]
        stack.mark(self.weight)
        for matrix, linear in zip(self.by_expert(self.weight.detach()), linears, strict=True):
            matrix.copy_(linear.weight.detach())
            linear.weight = None

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        """``[rows, in]``, sorted by expert, to ``[rows, out]``, and no bias."""
        if self.groups is None:
            raise RuntimeError(
                "moe-grouped-gemm: an expert's layer was called on its own, and does not know which rows "
                "belong to which expert; call the experts module"
            )
        receive = gradient_receiver(self.weight, self._megatron)
        deferred = deferred_gradient_of(self.weight)
        take = receive if deferred is None else partial(_defer, deferred, receive or WeightGradient.new)
        edge = None if deferred is None else deferred.edge
        output = grouped_matmul(
            rows, self.weight, self.groups, layout=self.layout, take_gradient=take, edge=edge
        )
        return output, None

    def backward_dw(self) -> None:
        """No-op: part of the interface of Megatron's layers, whose weight gradients may be delayed."""


def _defer(
    deferred: DeferredGradient, receive: Callable[[WeightGradient], Tensor | None], gradient: WeightGradient
) -> Tensor:
    later: Gradient = partial(receive, gradient)
    return deferred.defer(later)
