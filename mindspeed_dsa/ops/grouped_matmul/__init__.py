"""Grouped matmul: rows sorted by group, each group multiplied with its own matrix.

README.md in this folder has the mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops.backend import ShapeClass, choose, unless_empty
from mindspeed_dsa.ops.checks import check_float, check_shape, require
from mindspeed_dsa.ops.grouped_matmul.backends import GroupedMatmul, Groups
from mindspeed_dsa.ops.precision import outside_autocast, without_autocast

__all__ = [
    "OPERATOR",
    "Groups",
    "Layout",
    "WeightGradient",
    "grouped_matmul",
    "multiply_apart",
    "reads_sizes",
]

OPERATOR = "grouped_matmul"

if TYPE_CHECKING:  # mypy checks the module against the protocol
    from mindspeed_dsa.ops.grouped_matmul import triton

    MODULE: GroupedMatmul = triton

Layout = Literal["kn", "nk"]
"""Memory layout of each group's matrix: ``[in, out]``, or ``[out, in]`` as in a linear layer's weight."""


@dataclass(frozen=True)
class WeightGradient:
    """Deferred weight gradient of one grouped matmul; computed on request, for example into ``main_grad``.

    The object keeps ``rows`` and ``grad_output`` alive until the gradient is computed.
    """

    rows: Tensor
    """``[rows, in]``."""
    grad_output: Tensor
    """``[rows, out]``."""
    groups: Groups
    layout: Layout
    implementation: GroupedMatmul

    def add_to(self, main_grad: Tensor) -> None:
        """Add the gradient to ``main_grad``, without an intermediate copy if the backend supports this.

        Args:
            main_grad: tensor with the weight's shape and layout, in the weight's dtype or in fp32.
        """
        self._write(main_grad, accumulate=True)

    def new(self) -> Tensor:
        """Return the gradient in the weight's shape, layout and dtype; zero for groups without rows."""
        groups, shape = len(self.groups), (self.rows.shape[1], self.grad_output.shape[1])
        # [groups, in, out] or [groups, out, in]
        result = self.rows.new_empty(groups, *(shape if self.layout == "kn" else reversed(shape)))
        self._write(result, accumulate=False)
        return result

    def _write(self, into: Tensor, accumulate: bool) -> None:
        with without_autocast(into.device.type), torch.no_grad():
            self.implementation.weight_gradient(
                self.rows, self.grad_output, self.groups, _canonical(into, self.layout), accumulate
            )


@outside_autocast
def grouped_matmul(
    rows: Tensor,
    weight: Tensor,
    tokens_per_expert: Tensor | Sequence[int] | Groups,
    *,
    layout: Layout = "kn",
    take_gradient: Callable[[WeightGradient], Tensor | None] | None = None,
    edge: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute ``out[r] = rows[r] @ weight[g]`` for the rows ``r`` of each group ``g``.

    The groups' rows are consecutive. Products are accumulated in fp32 (fp64 for fp64). Some or all groups may
    be empty: the gradient of their matrices is zero, not undefined. Every backend is deterministic.

    Args:
        rows: ``[rows, in]``, fp32, bf16, fp16 or fp64.
        weight: ``[groups, in, out]``, or ``[groups, out, in]`` with ``layout="nk"``, in the dtype of
            ``rows``.
        tokens_per_expert: ``[groups]`` integers whose sum is the number of rows, on the host or on the device
            of ``rows``; or a :class:`Groups` made of them, which several calls can share. Backends for CUDA
            and NPUs read them without a device synchronization.
        layout: memory layout of the weight, see :data:`Layout`. No backend copies the weight to transpose it.
        take_gradient: callback that backward calls with a :class:`WeightGradient`, after the gradient of
            ``rows``. It may add the gradient to a buffer, compute it or keep it for later. The callback's
            return value is the gradient that autograd receives for ``weight``. Without a callback, autograd
            receives the computed gradient.
        edge: tensor that replaces ``weight`` in the autograd graph. The return value of ``take_gradient`` is
            then the gradient of ``edge``, and ``weight`` gets none from autograd.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        ``[rows, out]`` in the dtype of ``rows``.

    Raises:
        ValueError: a shape or dtype does not fit, or token counts on the host have another sum.
        BackendUnavailable: the requested backend cannot take the call.
    """
    check_shape(OPERATOR, "rows", rows, (None, None), "[rows, in]")
    require(layout in ("kn", "nk"), OPERATOR, f"layout must be 'kn' or 'nk', got {layout!r}")
    width = rows.shape[1]
    if layout == "kn":
        check_shape(OPERATOR, "weight", weight, (None, width, None), f"[groups, {width}, out]")
    else:
        check_shape(OPERATOR, "weight", weight, (None, None, width), f"[groups, out, {width}]")
    require(weight.numel() > 0, OPERATOR, f"weight must have entries, got {list(weight.shape)}")
    check_float(OPERATOR, rows=rows, weight=weight)
    groups = tokens_per_expert if isinstance(tokens_per_expert, Groups) else Groups(tokens_per_expert)
    groups.check(OPERATOR, len(weight), len(rows))
    selected: GroupedMatmul = choose(OPERATOR, backend, _shape_class(rows, weight, layout))
    implementation = unless_empty(OPERATOR, selected, rows)
    if not len(rows):
        groups = Groups([0] * len(weight))  # on the host, because the reference reads the sizes
    if edge is not None:
        weight = weight.detach()
    result: Tensor = _Multiply.apply(implementation, rows, weight, edge, groups, layout, take_gradient)
    return result


def reads_sizes(weight: Tensor, layout: Layout) -> bool:
    """Return whether the backend that `auto` selects for a weight needs the group sizes on the host.

    Args:
        weight: weight of :func:`grouped_matmul`, for rows of the same dtype.
        layout: layout of the weight.
    """
    selected: GroupedMatmul = choose(OPERATOR, "auto", _shape_class(weight, weight, layout))
    return selected.READS_SIZES


def _shape_class(rows: Tensor, weight: Tensor, layout: Layout) -> ShapeClass:
    width_in, width_out = weight.shape[1:] if layout == "kn" else reversed(weight.shape[1:])
    return ShapeClass.of(rows, ("groups", len(weight)), ("in", width_in), ("out", width_out))


def _canonical(weight: Tensor, layout: Layout) -> Tensor:
    """Return a ``[groups, in, out]`` view of the weight."""
    return weight if layout == "kn" else weight.transpose(1, 2)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        implementation: GroupedMatmul,
        rows: Tensor,
        weight: Tensor,
        edge: Tensor | None,
        groups: Groups,
        layout: Layout,
        take_gradient: Callable[[WeightGradient], Tensor | None] | None,
    ) -> Tensor:
        ctx.implementation, ctx.groups, ctx.layout = implementation, groups, layout
        ctx.take_gradient = take_gradient or WeightGradient.new
        ctx.save_for_backward(rows, weight)
        return implementation.multiply(rows, _canonical(weight, layout), groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        rows, weight = ctx.saved_tensors
        grad_output = grad_output.contiguous()  # a sum's gradient is one number, expanded with strides 0
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[1]:
            turned = _canonical(weight, ctx.layout).transpose(1, 2)  # [groups, out, in], a view
            with without_autocast(rows.device.type):
                grad_rows = ctx.implementation.multiply(grad_output, turned, ctx.groups)
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            gradient = WeightGradient(rows, grad_output, ctx.groups, ctx.layout, ctx.implementation)
            grad_weight = ctx.take_gradient(gradient)
        of_weight, of_edge = (grad_weight, None) if ctx.needs_input_grad[2] else (None, grad_weight)
        return None, grad_rows, of_weight, of_edge, None, None, None


# Groups whose weights are separate parameters, as one autograd node.


def multiply_apart(rows: Tensor, weights: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Multiply each group's rows with its own weight, transposed; bit-equal to one linear layer per group.

    Args:
        rows: ``[rows, in]``, sorted by group.
        weights: ``[out, in]`` weight of each group, in the rows' dtype.
        sizes: number of rows of each group.

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
        output = rows.new_empty(rows.shape[0], weights[0].shape[0])  # [rows, out]
        for part, weight, product in zip(rows.split(sizes), weights, output.split(sizes), strict=True):
            torch.mm(part, weight.t(), out=product)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        rows, *weights = ctx.saved_tensors
        grads = grad_output.contiguous().split(ctx.sizes)  # [group rows, out] each
        grad_rows = None
        if ctx.needs_input_grad[1]:
            grad_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)  # [rows, in]
            for grad, weight, product in zip(grads, weights, grad_rows.split(ctx.sizes), strict=True):
                torch.mm(grad, weight, out=product)
        grad_weights = [
            grad.t().mm(part) if needed else None
            for grad, part, needed in zip(grads, rows.split(ctx.sizes), ctx.needs_input_grad[2:], strict=True)
        ]
        return None, grad_rows, *grad_weights
