"""Triton kernels of the grouped matmul.

Tiles of rows never span groups. The number of tiles is known only on the device, so the maximum number of
programs is launched. Each program finds its group in the prefix sums, and programs without a tile return at
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mindspeed_dsa.ops.triton.common import product


@triton.jit
def find_tile(ends, tile, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a tile's group, first row, and the group's end; group ``GROUPS`` if there is no such tile."""
    group = tl.arange(0, BLOCK_G)
    inside = group < GROUPS
    end = tl.load(ends + group, mask=inside, other=0)
    start = tl.load(ends + group - 1, mask=inside & (group > 0), other=0)
    tiles = tl.where(inside, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
    tile_end = tl.cumsum(tiles, axis=0)
    # A tile's group is the number of groups whose tiles end at or before it.
    found = tl.sum(tl.where(inside & (tile_end <= tile), 1, 0), axis=0)
    here = group == found
    before = tl.sum(tl.where(here, tile_end - tiles, 0), axis=0)
    first = tl.sum(tl.where(here, start, 0), axis=0) + (tile - before) * BLOCK_M
    last = tl.sum(tl.where(here, end, 0), axis=0)
    return found, first, last


@triton.jit
def multiply_kernel(
    rows,
    weight,
    out,
    ends,
    width_in,
    width_out,
    row_stride,
    group_stride,
    in_stride,
    out_stride,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute one tile of ``out``, ``[rows, width_out]`` contiguous; one program per tile."""
    group, first, last = find_tile(ends, tl.program_id(0), GROUPS, BLOCK_G, BLOCK_M)
    if group < GROUPS:
        # For the compiler: the loop runs at least once.
        tl.assume(width_in > 0)
        row = first + tl.arange(0, BLOCK_M)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        valid, inside = row < last, column < width_out
        row_at = rows + row.to(tl.int64)[:, None] * row_stride
        weight_at = weight + group.to(tl.int64) * group_stride + column.to(tl.int64)[None, :] * out_stride
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, width_in, BLOCK_K):
            inner = k + tl.arange(0, BLOCK_K)
            known = inner < width_in
            a = tl.load(row_at + inner[None, :], mask=valid[:, None] & known[None, :], other=0.0)
            at = weight_at + inner.to(tl.int64)[:, None] * in_stride
            b = tl.load(at, mask=known[:, None] & inside[None, :], other=0.0)
            acc = product(a, b, acc, WIDEN)
        at = out + row.to(tl.int64)[:, None] * width_out + column[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=valid[:, None] & inside[None, :])


@triton.jit
def weight_gradient_kernel(
    rows,
    grad,
    into,
    ends,
    width_in,
    width_out,
    row_stride,
    grad_stride,
    group_stride,
    in_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute one tile of a group's ``[width_in, width_out]`` gradient, summed over rows in order."""
    group = tl.program_id(0)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    known, inside = k < width_in, n < width_out
    mask = known[:, None] & inside[None, :]
    matrix = into + group.to(tl.int64) * group_stride
    at = matrix + k.to(tl.int64)[:, None] * in_stride + n.to(tl.int64)[None, :] * out_stride
    if start < end:
        acc = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
        for m in range(start, end, BLOCK_M):
            row = m + tl.arange(0, BLOCK_M)
            valid = row < end
            place = row.to(tl.int64)[:, None]
            a = tl.load(
                rows + place * row_stride + k[None, :], mask=valid[:, None] & known[None, :], other=0.0
            )
            b = tl.load(
                grad + place * grad_stride + n[None, :], mask=valid[:, None] & inside[None, :], other=0.0
            )
            acc = product(tl.trans(a), b, acc, WIDEN)
        if ACCUMULATE:
            acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, acc.to(into.dtype.element_ty), mask=mask)
    else:
        # A group without rows has a zero gradient.
        if not ACCUMULATE:
            tl.store(at, tl.zeros([BLOCK_K, BLOCK_N], into.dtype.element_ty), mask=mask)
