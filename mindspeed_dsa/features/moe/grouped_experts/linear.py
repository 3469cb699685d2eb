"""The linear layers of all local experts as one: one stacked parameter, one operator, one gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.ops.grouped_matmul import Groups, Layout, WeightGradient, grouped_matmul, reads_sizes
from mindspeed_dsa.parallel.local_shards import cut_of, cut_on, local_of
from mindspeed_dsa.parallel.weight_gradients import (
    DeferredGradient,
    Gradient,
    deferred_gradient_of,
    placeholder,
)

_ATTRIBUTE = "stacks_experts"


@dataclass(frozen=True, eq=False)
class Stack:
    """Mark of a stacked parameter: how the experts' matrices lie in it.

    Attributes:
        layout: of each expert's matrix.
        experts: the same object for all stacks of one module's experts.
    """

    layout: Layout
    experts: object

    def by_expert(self, stack: Tensor) -> list[Tensor]:
        """Return views ``[out, in]`` of a tensor as large as the parameter, one for each expert."""
        return list((stack if self.layout == "nk" else stack.transpose(1, 2)).unbind())

    def stack(self, matrices: Sequence[Tensor]) -> Tensor:
        """Stack matrices as :meth:`by_expert` returns them, in memory of its own."""
        return torch.stack([matrix if self.layout == "nk" else matrix.T for matrix in matrices])

    def mark(self, parameter: Tensor) -> None:
        """Note it at the parameter."""
        setattr(parameter, _ATTRIBUTE, self)


def stack_of(parameter: Any) -> Stack | None:
    """Return what :meth:`Stack.mark` has noted."""
    return getattr(parameter, _ATTRIBUTE, None)


def runs(parameters: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield neighbours that are stacks of the same experts together, all others one by one."""
    for _, run in groupby(parameters, _together):
        yield list(run)


def _together(parameter: Any) -> int:
    stack = stack_of(parameter)
    return id(parameter if stack is None else stack.experts)


class GroupedLinear(torch.nn.Module):
    """Takes over the weights of the experts' layers, one expert after another.

    Nothing is gathered or reduced here: what experts get and return is the dispatcher's business, as it is
    for Megatron's layers with ``is_expert``.

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
        # Between experts, or across the input: what gated layers stack are rows of the output.
        cut_on(self.weight, (0, 2 if self.layout == "nk" else 1))
        for matrix, linear in zip(self.by_expert(self.weight.detach()), linears, strict=True):
            matrix.copy_(linear.weight.detach())
            linear.weight = None

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        """Multiply ``[rows, in]``, sorted by expert, to ``[rows, out]``; there is no bias."""
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

    def reads_sizes(self) -> bool:
        """Return whether the host reads the numbers of rows, so that they are better there than here."""
        return reads_sizes(self.weight, self.layout)

    def matrices(self) -> dict[int, Tensor]:
        """Return what this rank has of the experts' matrices ``[out, in]``, by local expert.

        A rank has some matrices of a stack that is cut between experts, and shards of all where it is cut
        otherwise.
        """
        weight = self.weight.detach()
        local = self.by_expert(local_of(weight))
        if not isinstance(weight, DTensor):
            return dict(enumerate(local))
        cut = cut_of(weight)
        if cut.dim == 0:
            return dict(enumerate(local, start=cut.index * len(local)))
        placements = [Shard(1) if isinstance(each, Shard) else each for each in weight.placements]
        return {
            number: DTensor.from_local(matrix, weight.device_mesh, placements, run_check=False)
            for number, matrix in enumerate(local)
        }

    def backward_dw(self) -> None:
        """No-op: part of the interface of Megatron's layers, whose weight gradients may be delayed."""


def _defer(
    deferred: DeferredGradient, receive: Callable[[WeightGradient], Tensor | None], gradient: WeightGradient
) -> Tensor:
    later: Gradient = partial(receive, gradient)
    return deferred.defer(later, (gradient.rows, gradient.grad_output))


def gradient_receiver(weight: Any, megatron: Megatron) -> Callable[[WeightGradient], Tensor | None] | None:
    """Return what puts the gradient of a stack into ``main_grad``; ``None``: autograd takes it.

    Megatron's data parallelism has a buffer ``main_grad`` for every parameter and a mark that says that the
    gradient is in it already, for which Megatron's linear layers need a fused kernel. All contributions to a
    parameter must go one way; those of a stack have but one origin.

    Args:
        weight: the parameter; its ``main_grad`` of now is the one used in backward.
        megatron: see :func:`placeholder`.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None or not hasattr(weight, "grad_added_to_main_grad"):
        return None

    def add(gradient: WeightGradient) -> Tensor | None:
        gradient.add_to(main_grad)
        return placeholder(weight, weight.dtype, megatron)

    return add
