"""Grouped linear layer: all local experts' weights in one parameter, multiplied by one operator."""

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
    """Description of a stacked parameter, attached to the parameter as an attribute.

    Attributes:
        layout: layout of each expert's matrix, ``kn`` or ``nk``.
        experts: token object shared by all stacks of one experts module, to identify them as adjacent.
    """

    layout: Layout
    experts: object

    def by_expert(self, stack: Tensor) -> list[Tensor]:
        """Return one view ``[out, in]`` per expert of ``stack``, a tensor shaped like the parameter."""
        return list((stack if self.layout == "nk" else stack.transpose(1, 2)).unbind())

    def stack(self, matrices: Sequence[Tensor]) -> Tensor:
        """Stack matrices ``[out, in]`` into a new tensor; inverse of :meth:`by_expert`."""
        return torch.stack([matrix if self.layout == "nk" else matrix.T for matrix in matrices])

    def mark(self, parameter: Tensor) -> None:
        """Attach this description to a parameter."""
        setattr(parameter, _ATTRIBUTE, self)


def stack_of(parameter: Any) -> Stack | None:
    """Return the description attached by :meth:`Stack.mark`, or ``None``."""
    return getattr(parameter, _ATTRIBUTE, None)


def runs(parameters: Iterable[Any]) -> Iterator[list[Any]]:
    """Group adjacent stacks of the same experts module; every other parameter is its own group."""
    for _, run in groupby(parameters, _together):
        yield list(run)


def _together(parameter: Any) -> int:
    stack = stack_of(parameter)
    return id(parameter if stack is None else stack.experts)


class GroupedLinear(torch.nn.Module):
    """Linear layer with the stacked weights of the local experts' linear layers.

    It runs no collectives, like Megatron's layers with ``is_expert``: the dispatcher moves tokens between
    ranks.

    Args:
        linears: Megatron's linear layers without bias, one per local expert. Their weights are removed.
        stack: description with the layout of ``weight``: ``[experts, in, out]`` or ``[experts, out, in]``.
        megatron: accessor of Megatron's modules, for its gradient conventions.

    Attributes:
        groups: row count of each expert, set by the experts module around each call.
    """

    def __init__(self, linears: Sequence[Any], stack: Stack, megatron: Megatron) -> None:
        super().__init__()
        self.layout, self._megatron = stack.layout, megatron
        self.by_expert, self.stack = stack.by_expert, stack.stack
        self.groups: Groups | None = None
        first = linears[0].weight
        shape = first.shape if self.layout == "nk" else first.shape[::-1]
        self.weight = Parameter(first.new_empty(len(linears), *shape), first.requires_grad)
        # Megatron's marks on a weight, for example allreduce.
        for name, value in vars(first).items():
            setattr(self.weight, name, value)
        if getattr(first, "partition_dim", -1) >= 0:
            # partition_dim counts in [out, in]. Layout kn swaps the two, and a stack adds one in front.
            of_matrix = first.partition_dim if self.layout == "nk" else 1 - first.partition_dim
            self.weight.partition_dim = 1 + of_matrix  # type: ignore[attr-defined]
        stack.mark(self.weight)
        # Shard between experts, or along the input dimension. Not along the output dimension, in which gated
        # layers concatenate gate and up projection.
        cut_on(self.weight, (0, 2 if self.layout == "nk" else 1))
        for matrix, linear in zip(self.by_expert(self.weight.detach()), linears, strict=True):
            matrix.copy_(linear.weight.detach())
            linear.weight = None

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        """Multiply rows ``[rows, in]``, sorted by expert, to ``[rows, out]``. Returns no bias.

        Raises:
            RuntimeError: ``groups`` is not set.
        """
        if self.groups is None:
            raise RuntimeError(
                "moe-grouped-gemm: an expert's layer was called on its own, and does not know which rows "
                "belong to which expert; call the experts module"
            )
        receive = gradient_receiver(self.weight, self._megatron)
        deferred = deferred_gradient_of(self.weight)
        # A deferred gradient is computed later, added to main_grad or returned as a new tensor.
        take = receive if deferred is None else partial(_defer, deferred, receive or WeightGradient.new)
        edge = None if deferred is None else deferred.edge
        output = grouped_matmul(
            rows, self.weight, self.groups, layout=self.layout, take_gradient=take, edge=edge
        )
        return output, None

    def reads_sizes(self) -> bool:
        """Return whether the host reads the row counts. If not, they can stay on the device."""
        return reads_sizes(self.weight, self.layout)

    def matrices(self) -> dict[int, Tensor]:
        """Return a dict from local expert to its matrix ``[out, in]``.

        If the stack is sharded along the experts, only the experts in this rank's shard are returned. If it
        is sharded along another dimension, each matrix is a sharded DTensor.
        """
        weight = self.weight.detach()
        local = self.by_expert(local_of(weight))
        if not isinstance(weight, DTensor):
            return dict(enumerate(local))
        cut = cut_of(weight)
        if cut.dim == 0:
            return dict(enumerate(local, start=cut.index * len(local)))
        # Along the input dimension, which is dimension 1 of a matrix [out, in].
        placements = [Shard(1) if isinstance(each, Shard) else each for each in weight.placements]
        return {
            number: DTensor.from_local(matrix, weight.device_mesh, placements, run_check=False)
            for number, matrix in enumerate(local)
        }

    def backward_dw(self) -> None:
        """Do nothing; Megatron's interface for delayed weight gradients requires this method."""


def _defer(
    deferred: DeferredGradient, receive: Callable[[WeightGradient], Tensor | None], gradient: WeightGradient
) -> Tensor:
    later: Gradient = partial(receive, gradient)
    return deferred.defer(later, (gradient.rows, gradient.grad_output))


def gradient_receiver(weight: Any, megatron: Megatron) -> Callable[[WeightGradient], Tensor | None] | None:
    """Return a function that accumulates a stack's gradient into ``main_grad``, or ``None``.

    ``None`` means that autograd accumulates the gradient, because the parameter has no ``main_grad`` of
    Megatron's DDP. Megatron's own linear layers accumulate into ``main_grad`` only with a fused kernel. A
    stack can do so always, because all of its gradients come from the grouped matmul.

    Args:
        weight: parameter; the function accumulates into its present ``main_grad``.
        megatron: accessor of Megatron's modules; see :func:`placeholder`.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None or not hasattr(weight, "grad_added_to_main_grad"):
        return None

    def add(gradient: WeightGradient) -> Tensor | None:
        gradient.add_to(main_grad)
        return placeholder(weight, weight.dtype, megatron)

    return add
