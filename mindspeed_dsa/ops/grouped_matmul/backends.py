"""Backends of the grouped matmul: plain PyTorch, one product for each group on CPUs, torch_npu's operators.

``triton.py`` beside this file has the one for NVIDIA GPUs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from mindspeed_dsa.ops import checks
from mindspeed_dsa.ops.backend import Backend, ShapeClass
from mindspeed_dsa.ops.checks import require
from mindspeed_dsa.ops.npu.device import DTYPES, npu_op, unavailable
from mindspeed_dsa.ops.precision import wide
from mindspeed_dsa.platforms.host_pool import upload

_ADD = "npu_grouped_matmul_add_"
# What the operator cuts by groups: rows of the product's left side, or what both sides are summed over.
_ROWS, _SUMMED = 0, 2
# One tensor goes in and one comes out; group lists hold prefix sums.
_ONE_TENSOR, _PREFIX_SUMS = 3, 0
# The manual's limits of a group list and of the last axis of a matrix, or of its transpose.
_MOST_GROUPS = 1024
_INNER_LIMIT = 65536


class Groups:
    """Numbers of rows of consecutive groups, on the host and on the device, where they end found once each.

    Args:
        tokens_per_expert: ``[groups]`` integers, on the host or on a device; not to be changed afterwards.
    """

    def __init__(self, tokens_per_expert: Tensor | Sequence[int]) -> None:
        self._numbers = tokens_per_expert
        self._ends: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def on_host(self) -> bool:
        """Return whether :attr:`sizes` is known without waiting for a device."""
        return not isinstance(self._numbers, Tensor) or self._numbers.device.type == "cpu"

    @cached_property
    def sizes(self) -> list[int]:
        """Return the rows of each group; waits for the device that they are on."""
        return self._numbers.tolist() if isinstance(self._numbers, Tensor) else list(self._numbers)

    def ends(self, device: torch.device) -> Tensor:
        """Return one past the last row of each group, ``[groups]`` int32; nothing waits for it."""
        if device not in self._ends:
            # Ascend's devices leave sums of int64 to their few processor cores.
            numbers = torch.as_tensor(self._numbers).to(torch.int32)
            self._ends[device] = upload(numbers.cumsum(0, dtype=torch.int32), device)
        return self._ends[device]

    def check(self, operator: str, groups: int, rows: int) -> None:
        """Raise ``ValueError`` unless they are ``groups`` numbers that fit ``rows`` rows.

        The sum of numbers on a device is looked at with debug checks on only, as that waits for it.
        """
        shape = list(self._numbers.shape) if isinstance(self._numbers, Tensor) else [len(self._numbers)]
        require(shape == [groups], operator, f"tokens_per_expert must be [{groups}], got {shape}")
        if isinstance(self._numbers, Tensor):
            dtype = self._numbers.dtype
            require(
                not dtype.is_floating_point and dtype != torch.bool,
                operator,
                f"tokens_per_expert must be integers, got {dtype}",
            )
        if self.on_host or checks.enabled():
            require(
                sum(self.sizes) == rows and min(self.sizes) >= 0,
                operator,
                f"tokens_per_expert must be numbers whose sum is the number of rows, {rows}, got "
                f"{sum(self.sizes)} as the sum and {min(self.sizes)} as the least",
            )


class GroupedMatmul(Backend, Protocol):
    """Backend of three products, of which two are one function: dX is the product with the transposed weight.

    Matrices come as views in which one of the two last axes is contiguous, whichever it is. There is at
    least one row, but in the reference.
    """

    READS_SIZES: bool
    """Whether the host reads the rows of each group; it waits for them where they are on a device."""

    @abstractmethod
    def multiply(self, rows: Tensor, weight: Tensor, groups: Groups, /) -> Tensor:
        """Multiply ``[rows, in]`` and ``[groups, in, out]`` to ``[rows, out]`` in the dtype of ``rows``."""

    @abstractmethod
    def weight_gradient(
        self, rows: Tensor, grad_output: Tensor, groups: Groups, into: Tensor, accumulate: bool, /
    ) -> None:
        """Add ``rows.T @ grad_output`` of each group to ``into``, or write it there.

        Args:
            rows: ``[rows, in]``.
            grad_output: ``[rows, out]``, contiguous.
            groups: of which rows belong together.
            into: ``[groups, in, out]``, in the dtype of ``rows`` or a wider one.
            accumulate: add; otherwise groups without rows get zeros.
        """


class Reference(GroupedMatmul):
    """Plain PyTorch: one product after another, in fp32 or wider."""

    READS_SIZES = True

    def multiply(self, rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        dtype = wide(rows.dtype)
        parts = rows.to(dtype).split(groups.sizes)
        products = [part @ matrix.to(dtype) for part, matrix in zip(parts, weight, strict=True)]
        return torch.cat(products).to(rows.dtype)

    def weight_gradient(
        self, rows: Tensor, grad_output: Tensor, groups: Groups, into: Tensor, accumulate: bool
    ) -> None:
        dtype = wide(rows.dtype)
        parts = rows.to(dtype).split(groups.sizes), grad_output.to(dtype).split(groups.sizes)
        for matrix, part, grad in zip(into, *parts, strict=True):
            product = part.T @ grad
            matrix.copy_(matrix + product if accumulate else product)


class Cpu(GroupedMatmul):
    """One product per group, written where it belongs.

    Torch's own ``grouped_mm`` is a loop too, needs widths of certain multiples, has no fp64, and cannot add
    to a gradient that is there already; adding the gradient inside of the product is what makes this loop
    faster than one linear layer for each group.
    """

    READS_SIZES = True

    def unsupported(self, shape: ShapeClass) -> str | None:
        return None if shape.device == "cpu" else "it runs on CPU tensors only"

    def multiply(self, rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        result = rows.new_empty(rows.shape[0], weight.shape[2])
        parts, products = rows.split(groups.sizes), result.split(groups.sizes)
        for size, part, matrix, product in zip(groups.sizes, parts, weight.unbind(), products, strict=True):
            if size:
                torch.mm(part, matrix, out=product)
        return result

    def weight_gradient(
        self, rows: Tensor, grad_output: Tensor, groups: Groups, into: Tensor, accumulate: bool
    ) -> None:
        if into.stride(2) != 1:
            # (rows.T @ grad).T = grad.T @ rows: products come in the order in which they lie in memory.
            rows, grad_output, into = grad_output, rows, into.transpose(1, 2)
        parts = rows.split(groups.sizes), grad_output.split(groups.sizes)
        for size, matrix, part, grad in zip(groups.sizes, into.unbind(), *parts, strict=True):
            if not size:
                if not accumulate:
                    matrix.zero_()
            elif matrix.dtype != part.dtype:
                product = torch.mm(part.T, grad)
                matrix.add_(product) if accumulate else matrix.copy_(product)
            elif accumulate:
                matrix.addmm_(part.T, grad)
            else:
                torch.mm(part.T, grad, out=matrix)


class Npu(GroupedMatmul):
    """torch_npu's operators."""

    READS_SIZES = False

    def unsupported(self, shape: ShapeClass) -> str | None:
        reason = unavailable(shape.device, "npu_grouped_matmul")
        if reason is not None:
            return reason
        if shape.dtype not in DTYPES:
            return "npu_grouped_matmul takes bfloat16 and float16 only"
        if shape["groups"] > _MOST_GROUPS:
            return f"npu_grouped_matmul takes at most {_MOST_GROUPS} groups"
        if max(shape["in"], shape["out"]) >= _INNER_LIMIT:
            return f"npu_grouped_matmul takes matrices whose axes are shorter than {_INNER_LIMIT}"
        return None

    def multiply(self, rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        return _call(rows, weight, groups, _ROWS)

    def weight_gradient(
        self, rows: Tensor, grad_output: Tensor, groups: Groups, into: Tensor, accumulate: bool
    ) -> None:
        # An operator that adds in fp32 exists since CANN 8.2; it takes contiguous fp32 only.
        if into.stride(2) != 1:
            # (rows.T @ grad).T = grad.T @ rows: products come in the order in which they lie in memory.
            rows, grad_output, into = grad_output, rows, into.transpose(1, 2)
        if accumulate and _adds_in_place(into):
            ends = groups.ends(rows.device).long()
            # Prefix sums are what it takes by default; older releases have no parameter that says so.
            npu_op(_ADD)(into, rows, grad_output, ends)
            return
        product = _call(rows.T, grad_output, groups, _SUMMED)
        into.add_(product) if accumulate else into.copy_(product)


def add_product(left: Tensor, right: Tensor, into: Tensor) -> bool:
    """Add ``left.T @ right`` to ``into`` by the operator, which sums in fp32: one group of all rows.

    Args:
        left: ``[rows, out]``.
        right: ``[rows, in]``.
        into: ``[out, in]``.

    Returns:
        False where the operator does not take them; nothing was done then.
    """
    fits = left.dtype == right.dtype and left.dtype in DTYPES and max(into.shape) < _INNER_LIMIT
    if not fits or not _adds_in_place(into):
        return False
    # Filled on the device: a copy of a number from the host would wait for it.
    end = torch.full((1,), left.size(0), dtype=torch.int64, device=left.device)
    npu_op(_ADD)(into[None], left, right, end)
    return True


def _adds_in_place(into: Tensor) -> bool:
    known = unavailable(into.device.type, _ADD) is None
    return known and into.dtype == torch.float32 and into.is_contiguous()


def _call(left: Tensor, right: Tensor, groups: Groups, group_type: int) -> Tensor:
    (product,) = npu_op("npu_grouped_matmul")(
        [left],
        [right],
        group_list=groups.ends(left.device).long(),
        split_item=_ONE_TENSOR,
        group_type=group_type,
        group_list_type=_PREFIX_SUMS,
    )
    return product
