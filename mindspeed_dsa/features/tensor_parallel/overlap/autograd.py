"""Autograd functions of column and row parallel linear layers that overlap communication with matmuls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.tensor_parallel.overlap import chunked
from mindspeed_dsa.features.tensor_parallel.overlap.chunked import Allocate
from mindspeed_dsa.parallel.saved_tensors import parameter_of
from mindspeed_dsa.parallel.weight_gradients import WeightGradient

Backend = Any
"""Module with the functions of ``chunked.py``."""


@dataclass(frozen=True)
class Plan:
    """Communication settings of one call of a parallel linear layer.

    Attributes:
        backend: module with ``Gather``, ``gather_matmul``, ``matmul_scatter`` and ``BESIDE_COLLECTIVES``. The
            latter is true if these functions may start while a collective of the group is in flight. Backends
            that support layers without sequence parallelism also have ``matmul_reduce``; fused operators do
            not.
        group: tensor parallel group.
        sequence_parallel: whether input (column parallel) or output (row parallel) is split over ranks along
            the sequence.
        forward, backward: number of chunks in each pass; with 1 the communication is the same as in stock
            Megatron.
        keep_gathered: whether a column parallel layer saves all ranks' rows for its backward.
        fusion: Megatron's ``gradient_accumulation_fusion``.
        megatron: Megatron package whose global memory buffer holds gathered rows that are not saved.
    """

    backend: Backend
    group: Any
    megatron: Megatron
    sequence_parallel: bool
    forward: int = 1
    backward: int = 1
    keep_gathered: bool = False
    fusion: bool = False

    def passing(self, local: Tensor) -> Allocate:
        """Return an allocator that uses Megatron's global memory buffer, which the next gather overwrites."""

        def allocate(shape: list[int]) -> Tensor:
            buffer = self.megatron("core.parallel_state").get_global_memory_buffer()
            rows: Tensor = buffer.get_tensor(shape, local.dtype, "mpu")
            return rows

        return allocate


def flat(tensor: Tensor) -> Tensor:
    """Reshape ``[..., width]`` to contiguous ``[rows, width]``."""
    return tensor.reshape(-1, tensor.size(-1)).contiguous()


def shaped(rows: Tensor, like: Tensor, sequence: int) -> Tensor:
    """Reshape ``[rows, width]`` to ``[sequence, ...]`` with the other leading dimensions of ``like``."""
    # Not a view for autograd: consumers such as the cross entropy change outputs in place, which autograd
    # forbids for views returned by a custom function.
    shape = [sequence, *like.shape[1:-1], rows.size(-1)]
    output: Tensor = torch.ops.aten._unsafe_view(rows, shape)
    return output


class Column(torch.autograd.Function):
    """Column parallel linear function: ``gathered(input) @ weight.T + bias``.

    ``input`` is ``[sequence / tp, batch, in]`` under sequence parallelism, else ``[sequence, batch, in]``.
    ``weight`` is ``[out / tp, in]``, and the output is ``[sequence, batch, out / tp]``. Backward sums the
    input gradient over ranks.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        ranks = plan.group.size() if plan.sequence_parallel else 1
        rows = flat(input)
        saved = rows
        if plan.sequence_parallel:
            # A frozen weight needs no input for its gradient.
            keep = plan.keep_gathered and weight.requires_grad
            allocate = rows.new_empty if keep else plan.passing(rows)
            product, whole = plan.backend.gather_matmul(rows, weight.t(), plan.group, plan.forward, allocate)
            if keep:
                saved = whole
        else:
            product = torch.mm(rows, weight.t())
        if bias is not None:
            product.add_(bias)
        _remember(ctx, saved, input, weight, plan)
        ctx.has_bias_grad = bias is not None and weight.requires_grad
        return shaped(product, input, input.size(0) * ranks)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        weight, gradient = _recall(ctx)
        grad = flat(grad_output)
        grad_input, grad_weight = column_backward(weight, grad, plan, gradient)
        grad_bias = grad.sum(dim=0) if ctx.has_bias_grad else None
        return grad_input.view(ctx.input_shape), grad_weight, grad_bias, None


def column_backward(
    weight: Tensor, grad: Tensor, plan: Plan, gradient: WeightGradient | None
) -> tuple[Tensor, Tensor | None]:
    """Compute input and weight gradients; the input gradient is communicated during the weight's matmul.

    Args:
        weight: ``[out / tp, in]``.
        grad: output gradient ``[rows, out / tp]``, or ``[tp * rows, out / tp]`` under sequence parallelism.
        plan: communication of the layer.
        gradient: accumulator of the weight gradient. It has the layer's input, ``[rows, in]``, or
            ``[tp * rows, in]`` if the gathered rows were kept. ``None`` for a frozen weight.
    """
    if not plan.sequence_parallel:
        # The all-reduce runs during the weight gradient's matmul.
        pending = plan.backend.matmul_reduce(grad, weight, plan.group, plan.backward)
        if gradient is not None:
            gradient.add(grad, gradient.rows)
    else:
        gather, backend = None, plan.backend
        if gradient is not None and gradient.rows.size(0) != grad.size(0):
            # Start the gather now: the link is idle until the first chunk is multiplied, and only the weight
            # gradient at the end reads the gathered rows.
            gather = backend.Gather(gradient.rows, plan.group, 1, plan.passing(gradient.rows))
            # Collectives of a group keep their order, but an operator that communicates by itself has no
            # place in that order.
            backend = backend if backend.BESIDE_COLLECTIVES else chunked
        pending = backend.matmul_scatter(grad, weight, plan.group, plan.backward)
        if gradient is not None:
            gradient.add(grad, gradient.rows if gather is None else gather.wait())
    return pending.wait(), None if gradient is None else gradient.result(grad.dtype)


class Row(torch.autograd.Function):
    """Row parallel linear function: ``input @ weight.T``, all-reduced over ranks.

    Under sequence parallelism, the product is reduce-scattered along the sequence instead.

    ``input`` is ``[sequence, batch, in / tp]`` and ``weight`` is ``[out, in / tp]``. The output is
    ``[sequence / tp, batch, out]`` under sequence parallelism, else ``[sequence, batch, out]``.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, plan: Plan) -> Tensor:
        rows = flat(input)
        start = plan.backend.matmul_scatter if plan.sequence_parallel else plan.backend.matmul_reduce
        pending = start(rows, weight.t(), plan.group, plan.forward)
        _remember(ctx, rows, input, weight, plan)
        ranks = plan.group.size() if plan.sequence_parallel else 1
        return shaped(pending.wait(), input, input.size(0) // ranks)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        weight, gradient = _recall(ctx)
        grad = flat(grad_output)
        if plan.sequence_parallel:
            grad_input, grad_weight = row_backward(weight, grad, plan, gradient)
        else:
            grad_input, grad_weight = torch.mm(grad, weight), None
            if gradient is not None:
                gradient.add(grad, gradient.rows)
                grad_weight = gradient.result(grad.dtype)
        return grad_input.view(ctx.input_shape), grad_weight, None


def row_backward(
    weight: Tensor, grad: Tensor, plan: Plan, gradient: WeightGradient | None
) -> tuple[Tensor, Tensor | None]:
    """Compute input and weight gradients under sequence parallelism while ``grad`` is gathered in chunks.

    Args:
        weight: ``[out, in / tp]``.
        grad: output gradient of this rank's rows, ``[rows, out]``.
        plan: communication of the layer.
        gradient: accumulator of the weight gradient, with input ``[tp * rows, in / tp]``; ``None`` for a
            frozen weight.
    """
    # One chunk, or a weight gradient that must be computed in one piece: gather everything first.
    count = grad.size(0)
    if plan.backward == 1 or (gradient is not None and not gradient.in_pieces):
        grad_input, whole = plan.backend.gather_matmul(
            grad, weight, plan.group, plan.backward, plan.passing(grad)
        )
        if gradient is not None:
            gradient.add(whole, gradient.rows)
    else:
        gather = plan.backend.Gather(grad, plan.group, plan.backward, plan.passing(grad))
        grad_input = grad.new_empty(gather.ranks * count, weight.size(1))
        for rank, first, end, part in gather.arriving():
            # Rank r's rows first:end are rows r * count + first to r * count + end of the whole.
            place = slice(rank * count + first, rank * count + end)
            torch.mm(part, weight, out=grad_input[place])
            if gradient is not None:
                gradient.add(part, gradient.rows[place])
    return grad_input, None if gradient is None else gradient.result(grad.dtype)


def _remember(ctx: Any, rows: Tensor, input: Tensor, weight: Tensor, plan: Plan) -> None:
    """Save the tensors for backward; ``rows`` are only saved if the weight is trainable."""
    learns = weight.requires_grad
    ctx.save_for_backward(weight, *([rows] if learns else []))
    ctx.plan, ctx.input_shape = plan, input.shape
    # Not saved through autograd: it may change in place between forward and backward.
    ctx.main_grad = getattr(weight, "main_grad", None) if plan.fusion and learns else None
    ctx.learns = learns


def _recall(ctx: Any) -> tuple[Tensor, WeightGradient | None]:
    if not ctx.learns:
        (weight,) = ctx.saved_tensors
        return weight, None
    weight, rows = ctx.saved_tensors
    parameter, plan = parameter_of(weight), ctx.plan
    return weight, WeightGradient(parameter, rows, ctx.main_grad, plan.fusion, plan.megatron)
