"""Grouped matmul on Ascend NPUs: torch_npu's ``npu_grouped_matmul``."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.grouped_matmul.groups import Groups
from mindspeed_dsa.ops.npu.device import DTYPES, npu_op, unavailable

_ADD = "npu_grouped_matmul_add_"
# What the operator cuts by groups: rows of the product's left side, or what both sides are summed over.
_ROWS, _SUMMED = 0, 2
# One tensor goes in and one comes out; group lists hold prefix sums.
_ONE_TENSOR, _PREFIX_SUMS = 3, 0
# The manual's limits of a group list and of the last axis of a matrix, or of its transpose.
_MOST_GROUPS = 1024
_INNER_LIMIT = 65536


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
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


def multiply(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """``[rows, in]`` and ``[groups, in, out]`` to ``[rows, out]``; the weight may be a transposed view."""
    return _call(rows, weight, groups, _ROWS)


def weight_gradient(
    rows: Tensor, grad_output: Tensor, groups: Groups, into: Tensor, accumulate: bool
) -> None:
    """``rows.T @ grad_output`` of each group, added to ``into`` or written to it.

    An operator that adds in fp32 exists since CANN 8.2; it takes contiguous fp32 only.
    """
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
