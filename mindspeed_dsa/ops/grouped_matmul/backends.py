"""Backends of the grouped matmul: plain PyTorch, one product per group on CPUs, torch_npu's operators.

The backend for NVIDIA GPUs is ``triton.py``.
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
# Dimension that groups partition: the rows of the left operand, or the dimension that is summed over.
_ROWS, _SUMMED = 0, 2
# split_item: one input and one output tensor. group_list_type: group lists hold prefix sums.
_ONE_TENSOR, _PREFIX_SUMS = 3, 0
# Limits in the manual: entries of a group list, and the last axis of a matrix or of its transpose.
_MOST_GROUPS = 1024
_INNER_LIMIT = 65536


class Groups:
    """Row counts of consecutive groups; caches the counts on the host and the group ends on the device.

    Args:
        tokens_per_expert: ``[groups]`` integers, on the host or on a device; must not be modified afterwards.
    """

    def __init__(self, tokens_per_expert: Tensor | Sequence[int]) -> None:
        self._numbers = tokens_per_expert
        self._ends: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def on_host(self) -> bool:
        """Return whether :attr:`sizes` is available without a device synchronization."""
        return not isinstance(self._numbers, Tensor) or self._numbers.device.type == "cpu"

    @cached_property
    def sizes(self) -> list[int]:
        """Return the number of rows of each group; synchronizes if the counts are on a device."""
        return self._numbers.tolist() if isinstance(self._numbers, Tensor) else list(self._numbers)

    def ends(self, device: torch.device) -> Tensor:
        """Return one past the last row of each group, ``[groups]`` int32, without a synchronization."""
        if device not in self._ends:
            # int32, because Ascend devices run int64 sums on their few processor cores.
            numbers = torch.as_tensor(self._numbers).to(torch.int32)
            self._ends[device] = upload(numbers.cumsum(0, dtype=torch.int32), device)
        return self._ends[device]

    def check(self, operator: str, groups: int, rows: int) -> None:
        """Raise ``ValueError`` unless there are ``groups`` counts whose sum is ``rows``.

        The sum of counts on a device is checked only with debug checks on, because that takes a
        synchronization.
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
    """Backend of the grouped matmul and its gradients.

    For the gradient of ``rows``, callers call :meth:`multiply` with the transposed weight. So in a weight
    either of the last two axes may be the contiguous one. Only the reference gets calls without rows.
    """

    READS_SIZES: bool
    """Whether the host reads the group sizes, which takes a synchronization if they are on a device."""

    @abstractmethod
    def multiply(self, rows: Tensor, weight: Tensor, groups: Groups, /) -> Tensor:
        """Multiply ``[rows, in]`` and ``[groups, in, out]`` to ``[rows, out]`` in the dtype of ``rows``."""

    @abstractmethod
    def weight_gradient(
        self, rows: Tensor, grad_output: Tensor, groups: Groups, into: Tensor, accumulate: bool, /
    ) -> None:
        """Add ``rows.T @ grad_output`` of each group to ``into``, or overwrite it.

        Args:
            rows: ``[rows, in]``.
            grad_output: ``[rows, out]``, contiguous.
            groups: groups of the rows.
            into: ``[groups, in, out]``, in the dtype of ``rows`` or a wider one.
            accumulate: whether to add. Otherwise groups without rows get zeros.
        """


class Reference(GroupedMatmul):
    """Backend in plain PyTorch: one product per group, in fp32 or wider."""

    READS_SIZES = True

    def multiply(self, rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        dtype = wide(rows.dtype)
        parts = rows.to(dtype).split(groups.sizes)  # [group rows, in] each
        products = [part @ matrix.to(dtype) for part, matrix in zip(parts, weight, strict=True)]
        return torch.cat(products).to(rows.dtype)  # [rows, out]

    def weight_gradient(
        self, rows: Tensor, grad_output: Tensor, groups: Groups, into: Tensor, accumulate: bool
    ) -> None:
        dtype = wide(rows.dtype)
        parts = rows.to(dtype).split(groups.sizes), grad_output.to(dtype).split(groups.sizes)
        for matrix, part, grad in zip(into, *parts, strict=True):
            product = part.T @ grad
            matrix.copy_(matrix + product if accumulate else product)


class Cpu(GroupedMatmul):
    """Backend that writes one matmul per group directly into the output.

    Torch's own ``grouped_mm`` is a loop on CPUs too. It requires aligned widths, has no fp64, and cannot add
    to an existing gradient. Accumulating inside the matmul makes this loop faster than one linear layer per
    group.
    """

    READS_SIZES = True

    def unsupported(self, shape: ShapeClass) -> str | None:
        return None if shape.device == "cpu" else "it runs on CPU tensors only"

    def multiply(self, rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        result = rows.new_empty(rows.shape[0], weight.shape[2])  # [rows, out]
        parts, products = rows.split(groups.sizes), result.split(groups.sizes)
        for size, part, matrix, product in zip(groups.sizes, parts, weight.unbind(), products, strict=True):
            if size:
                torch.mm(part, matrix, out=product)
        return result

    def weight_gradient(
        self, rows: Tensor, grad_output: Tensor, groups: Groups, into: Tensor, accumulate: bool
    ) -> None:
        if into.stride(2) != 1:
            # (rows.T @ grad).T = grad.T @ rows: swap the operands, so that products are in memory order.
            rows, grad_output, into = grad_output, rows, into.transpose(1, 2)  # into: [groups, out, in]
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
    """Backend that calls torch_npu's grouped matmul operators."""

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
        # Since CANN 8.2 an operator adds in fp32; it takes contiguous fp32 only.
        if into.stride(2) != 1:
            # (rows.T @ grad).T = grad.T @ rows: swap the operands, so that products are in memory order.
            rows, grad_output, into = grad_output, rows, into.transpose(1, 2)  # into: [groups, out, in]
        if accumulate and _adds_in_place(into):
            ends = groups.ends(rows.device).long()
            # Prefix sums are its default; older releases have no parameter for the kind of list.
            npu_op(_ADD)(into, rows, grad_output, ends)
            return
        product = _call(rows.T, grad_output, groups, _SUMMED)
        into.add_(product) if accumulate else into.copy_(product)


def add_product(left: Tensor, right: Tensor, into: Tensor) -> bool:
    """Add ``left.T @ right`` to ``into`` with torch_npu's grouped matmul, which accumulates in fp32.

    Args:
        left: ``[rows, out]``.
        right: ``[rows, in]``.
        into: ``[out, in]``.

    Returns:
        True if the operator ran; False if it does not support the tensors and ``into`` is unchanged.
    """
    fits = left.dtype == right.dtype and left.dtype in DTYPES and max(into.shape) < _INNER_LIMIT
    if not fits or not _adds_in_place(into):
        return False
    # Filled on the device, because a copy from the host would synchronize.
    end = torch.full((1,), left.size(0), dtype=torch.int64, device=left.device)  # [1]
    npu_op(_ADD)(into[None], left, right, end)  # into: [1, out, in]
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
