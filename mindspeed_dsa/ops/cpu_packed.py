"""Products whose second operand is laid out once, for the kernels of ``cpu_kernel.py``.

Where there are no such kernels, operands are used as they are, and products are the libraries'.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.ops.cpu_blocks import Scratch
from mindspeed_dsa.ops.cpu_kernel import block_product, has_kernel, pairs_of_rows
from mindspeed_dsa.ops.cpu_products import product


class Packed(NamedTuple):
    """The second operand of products, ``[k, n]``, or some of its rows or columns."""

    data: Tensor
    """``[k, n]``; of bf16 for a kernel ``[k / 2, n, 2]``."""
    for_kernel: bool

    def columns(self, part: slice) -> Packed:
        """Some of its columns."""
        return Packed(self.data[:, part], self.for_kernel)

    def rows(self, part: slice) -> Packed:
        """Some of its rows, from an even one to an even or the last one."""
        if self.data.dim() == 2:
            return Packed(self.data[part], self.for_kernel)
        if part.start % 2:
            raise ValueError(f"rows from {part.start} on begin in the middle of a pair")
        return Packed(self.data[part.start // 2 : (part.stop + 1) // 2], self.for_kernel)


def pack(x: Tensor, operand: torch.dtype, scratch: Scratch, name: str) -> Packed:
    """Lay out a second operand.

    Args:
        x: ``[k, n]``, any strides and floating dtype; not copied where it is as it should be, so rows that
            are far apart in memory stay so.
        operand: dtype of the product's operands.
        scratch: where copies lie.
        name: of the copy.
    """
    (k, n), for_kernel = x.shape, has_kernel(operand)
    if not for_kernel:
        return Packed(scratch.rounded(name, x, operand), False)
    if operand != torch.bfloat16:
        return Packed(_in_rows(x, operand, scratch, name), True)
    pairs = scratch(f"{name} in pairs", (k + 1) // 2, n, dtype=torch.int32)
    # Under the same names for all operands: no longer needed once the pairs are there.
    apart = scratch("rows apart", k // 2, n, dtype=torch.int32)
    return Packed(pairs_of_rows(_in_rows(x, operand, scratch, "rows to pair"), pairs, apart), True)


def first_operand(x: Tensor, operand: torch.dtype, scratch: Scratch, name: str) -> Tensor:
    """``x``, ``[m, k]``, as a first operand; with a column of zeros where a kernel needs an even number."""
    if not has_kernel(operand):
        return scratch.rounded(name, x, operand)
    if operand == torch.bfloat16 and x.shape[1] % 2:
        m, k = x.shape
        padded = scratch(f"{name} padded", m, k + 1, dtype=operand)
        padded[:, :k].copy_(x)
        padded[:, k] = 0
        return padded
    return _in_rows(x, operand, scratch, name)


def multiply(a: Tensor, b: Packed, out: Tensor, add: bool = False) -> None:
    """``a @ b`` into ``out``, or added to it.

    Args:
        a: a :func:`first_operand`, ``[m, k]``.
        b: ``[k, n]``, packed for the same dtype.
        out: ``[m, n]`` in the dtype that sums of these operands have, with neighbouring columns.
        add: whether to add.
    """
    if b.for_kernel:
        block_product(a, b.data, out, add)
    else:
        product(a, b.data, out, 1.0, add)


def _in_rows(x: Tensor, operand: torch.dtype, scratch: Scratch, name: str) -> Tensor:
    apart = x.stride(0) >= x.shape[1] or len(x) == 1
    if x.dtype == operand and x.stride(1) == 1 and apart:
        return x
    return scratch(name, *x.shape, dtype=operand).copy_(x)
