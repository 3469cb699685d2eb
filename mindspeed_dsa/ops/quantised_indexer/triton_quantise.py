"""Triton kernel that quantises rows to e4m3 with one factor each, bit-identical to :mod:`arithmetic`.

The kernel reads and writes each number once: 3 bytes for bf16. With PyTorch's operators, each of which is a
pass over fp32 numbers, quantisation would take longer than the scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_dsa.ops.quantised_indexer.arithmetic import LARGEST, SMALLEST_AMAX
from mindspeed_dsa.ops.triton.common import block, dense_rows, load_rows, store_rows
from mindspeed_dsa.ops.triton.launch import on_grid

# Numbers that one program quantises.
_NUMBERS = 4096


@triton.jit
def quantise_kernel(
    rows,
    numbers,
    factors,
    count,
    middle,
    inner,
    outer_stride,
    middle_stride,
    inner_stride,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
):
    """Quantise rows of ``[outer, middle, inner]``, bit-identical to PyTorch; ``ROWS`` rows per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    at = row // inner // middle * outer_stride + row // inner % middle * middle_stride
    given = load_rows(rows, at + row % inner * inner_stride, inside, 0, DIM, BLOCK_D).to(tl.float32)
    magnitudes = tl.abs(given)
    finite = tl.min((magnitudes < float("inf")).to(tl.int32), axis=1) > 0
    factor = tl.maximum(tl.max(magnitudes, axis=1), SMALLEST_AMAX) * (1 / LARGEST)
    if POWERS_OF_TWO:
        factor = ((factor.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    # A division without rounding to nearest could move a number across the middle of a step.
    quotients = tl.div_rn(given, tl.broadcast_to(factor[:, None], [ROWS, BLOCK_D]))
    quotients = tl.minimum(tl.maximum(quotients, -LARGEST), LARGEST)
    # e4m3 has steps of an eighth of a power of two, from 2^-6 on. Adding 1.5 x 2^23 steps to a number, in
    # fp32, rounds it to a multiple of the step, to nearest even; subtracting them again is exact.
    power = (quotients.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power, 0.015625) * (0.125 * 12582912.0)
    quotients = (quotients + shift) - shift
    quotients = tl.where(finite[:, None], quotients, 0.0)
    store_rows(numbers, row * DIM, inside, quotients, 0, DIM, BLOCK_D)
    tl.store(factors + row, tl.where(finite, factor, float("nan")), mask=inside)


def quantise(rows: Tensor, powers_of_two: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute :func:`mindspeed_dsa.ops.quantised_indexer.arithmetic.quantise` with a kernel.

    Args:
        rows: ``[..., dim]`` with one to three dimensions before the last, fp32, bf16 or fp16.
        powers_of_two: whether factors are rounded up to powers of two.
        dtype: dtype of the numbers, which must represent e4m3 exactly.

    Returns:
        Numbers, ``[..., dim]``, and factors, fp32 ``[...]``. A row that is not finite has zeros and a NaN
        factor.
    """
    rows = dense_rows(rows)
    *outer, dim = rows.shape
    numbers = torch.empty(rows.shape, dtype=dtype, device=rows.device)  # [..., dim]
    factors = torch.empty(outer, dtype=torch.float32, device=rows.device)  # [...]
    # The kernel has three outer dimensions; missing ones have size 1 and stride 0.
    missing = [1] * (3 - len(outer))
    _, middle, inner = missing + outer
    count, at_once = factors.numel(), max(1, _NUMBERS // block(dim))
    on_grid(quantise_kernel, triton.cdiv(count, at_once))(
        rows,
        numbers,
        factors,
        count,
        middle,
        inner,
        *[0] * len(missing),
        *rows.stride()[:-1],
        DIM=dim,
        BLOCK_D=block(dim),
        ROWS=at_once,
        LARGEST=LARGEST,
        SMALLEST_AMAX=SMALLEST_AMAX,
        POWERS_OF_TWO=powers_of_two,
        num_warps=4,
    )
    return numbers, factors
