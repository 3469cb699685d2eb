"""Gradients of sparse flash attention for up to 32 heads on Hopper, in Gluon.

A program processes one row, whose queries and output gradients stay in shared memory. Keys form the rows of
products and heads the columns, so that products are not padded to 64 heads. Two warp groups take every second
tile of 64 keys each, with a buffer of their own, and do not wait for each other before the end of the row. So
one group's products run while the other one adds gradients of keys to memory, which bounds the kernel's
speed. A group gathers its next tile as soon as the queries' gradients have been multiplied with this one.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mindspeed_dsa.ops.sparse_flash_attention.hopper_backward_rows import (
    LINES,
    SLICE,
    SLICES,
    add_slice,
    starts_of,
    target_of,
)
from mindspeed_dsa.ops.sparse_flash_attention.hopper_common import (
    BLOCK,
    COPIES,
    COPYING,
    LOG2E,
    TAIL,
    TILE,
    VALUE,
    barrier_of,
    barriers_of,
    copy_rows,
    group_barrier,
    kept_inside,
    load_indices,
    place_of_row,
    power_of_two,
    seen_as,
)
from mindspeed_dsa.ops.sparse_flash_attention.hopper_forward import SCORES

# A product of 64 keys' probabilities, kept in registers, with columns of queries or output gradients.
FROM_REGISTERS: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))


@gluon.jit
def gather_keys(index, keys, key_row, key_length, k_value, k_tail, key_full):
    """Copy a tile of keys to shared memory, zeros for entries that are no keys."""
    valid = (index >= 0) & (index < key_length)
    starts = keys + index.to(gl.int64) * key_row
    copy_rows(k_value, starts, valid, 0, VALUE)
    copy_rows(k_tail, starts, valid, VALUE, TAIL)
    async_copy.mbarrier_arrive(key_full, increment_count=False)


@gluon.jit
def slice_of_keys(weights, gradient, tiles, only, NUMBER: gl.constexpr):
    """Start computing ``SLICE`` columns of the gradients of a tile's keys, ``[keys, columns]``."""
    q_value, q_tail, grad_value = tiles
    acc = gl.full([BLOCK, SLICE], 0.0, gl.float32, layout=SCORES)
    if NUMBER * SLICE < VALUE:
        grad_slice = grad_value.index(only).slice(NUMBER * SLICE, SLICE, 1)
        acc = warpgroup_mma(weights, grad_slice, acc, use_acc=False, is_async=True)
        query = q_value.index(only).slice(NUMBER * SLICE, SLICE, 1)
        return warpgroup_mma(gradient, query, acc, is_async=True)
    # The output has no rotary columns, so only the scores' gradient contributes.
    return warpgroup_mma(gradient, q_tail.index(only), acc, use_acc=False, is_async=True)


@gluon.jit
def store_heads(target, heads, sums, FIRST: gl.constexpr):
    """Store rows of ``[columns, heads]`` as columns of the query gradient; padding heads are skipped."""
    layout: gl.constexpr = sums.type.layout
    head = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout))
    column = FIRST + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, layout))
    offsets = head.to(gl.int64)[None, :] * (VALUE + TAIL) + column[:, None]
    gl.store(target + offsets, sums.to(target.dtype.element_ty), mask=(head < heads)[None, :])


@gluon.jit
def take_tiles(
    row,
    operands,
    results,
    scales,
    tiles,
    barriers,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    WITH_SUM: gl.constexpr,
    ORDERED: gl.constexpr,
    ATOMIC: gl.constexpr,
):
    """Code of a warp group: all gradients of every second tile, starting at tile ``GROUP``."""
    row_indices, length, key_length = row
    queries, of_heads, keys = operands
    base, query_head, grad_base, grad_head = queries
    lse, delta, heads = of_heads
    key_value, key_row = keys
    grad_query, grad_keys, attention_sum = results
    softmax_scale, scale_log2 = scales
    q_value, q_tail, grad_value, k_value, k_tail, gradients = tiles
    row_full, key_full, done = barriers
    copied: gl.constexpr = gl.SliceLayout(1, COPIES)
    dtype: gl.constexpr = q_value.dtype
    head = gl.arange(0, HEADS, layout=copied)
    if GROUP == 0:
        query_starts = base + head.to(gl.int64) * query_head
        copy_rows(q_value.index(0), query_starts, head < heads, 0, VALUE)
        copy_rows(q_tail.index(0), query_starts, head < heads, VALUE, TAIL)
    else:
        copy_rows(grad_value.index(0), grad_base + head.to(gl.int64) * grad_head, head < heads, 0, VALUE)
    async_copy.mbarrier_arrive(row_full, increment_count=False)
    tiles_of_row = gl.cdiv(length, BLOCK)
    if tiles_of_row > GROUP:
        first_index = load_indices(row_indices, GROUP, length, copied)
        gather_keys(
            first_index, key_value, key_row, key_length, k_value.index(GROUP), k_tail.index(GROUP),
            key_full.index(GROUP),
        )  # fmt: skip
    # [keys, heads], and [columns, heads]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    added: gl.constexpr = gl.SliceLayout(1, LINES)
    head = gl.arange(0, HEADS, layout=columns)
    acc_value = gl.full([VALUE, HEADS], 0.0, gl.float32, layout=layout)
    acc_tail = gl.full([TAIL, HEADS], 0.0, gl.float32, layout=layout)
    mbarrier.wait(row_full, 0)
    for tile in range(GROUP, tiles_of_row, 2):
        following = load_indices(row_indices, tile + 2, length, copied)
        mbarrier.wait(key_full.index(GROUP), (tile >> 1) & 1)
        fence_async_shared()
        only = kept_inside(0)
        own = kept_inside(GROUP)
        none = gl.full([BLOCK, HEADS], 0.0, gl.float32, layout=layout)
        value, tail = k_value.index(own), k_tail.index(own)
        scores = warpgroup_mma(value, q_value.index(only).permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma(tail, q_tail.index(only).permute((1, 0)), scores, is_async=True)
        inner = warpgroup_mma(
            value, grad_value.index(only).permute((1, 0)), none, use_acc=False, is_async=True
        )
        # Loaded for each tile: kept in registers, they would displace sums.
        norm = gl.load(lse + head, mask=head < heads, other=float("inf")) * LOG2E
        row_delta = gl.load(delta + head, mask=head < heads, other=0.0) * softmax_scale
        scores = warpgroup_mma_wait(1, deps=(scores,))
        # Clamped, and NaN kept, as in the kernel for more heads.
        exponent = scores * scale_log2 - norm[None, :]
        weight = power_of_two(gl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))
        if WITH_SUM:
            key = load_indices(row_indices, tile, length, rows)
            gl.store(
                attention_sum + tile * BLOCK + gl.arange(0, BLOCK, layout=rows),
                gl.sum(weight, axis=1),
                mask=(key >= 0) & (key < key_length),
            )
        inner = warpgroup_mma_wait(0, deps=(inner,))
        gradient = (weight * (inner * softmax_scale - row_delta[None, :])).to(dtype)
        gradients.index(GROUP).store(gradient)
        fence_async_shared()
        group_barrier()
        acc_value = warpgroup_mma(value.permute((1, 0)), gradients.index(own), acc_value, is_async=True)
        acc_tail = warpgroup_mma(tail.permute((1, 0)), gradients.index(own), acc_tail, is_async=True)
        weights = gl.convert_layout(weight.to(dtype), FROM_REGISTERS)
        gradient = gl.convert_layout(gradient, FROM_REGISTERS)
        of_row = (q_value, q_tail, grad_value)
        current = slice_of_keys(weights, gradient, of_row, only, 0)
        acc_value, acc_tail = warpgroup_mma_wait(2, deps=(acc_value, acc_tail))
        # All warps have read the tile.
        group_barrier()
        if tile + 2 < tiles_of_row:
            gather_keys(
                following, key_value, key_row, key_length, k_value.index(GROUP), k_tail.index(GROUP),
                key_full.index(GROUP),
            )  # fmt: skip
        index = load_indices(row_indices, tile, length, added)
        starts = starts_of(index, tile, ORDERED)
        for number in gl.static_range(SLICES):
            current = warpgroup_mma_wait(0, deps=(current,))
            add_slice(grad_keys, starts, index, key_length, current, number * SLICE, ATOMIC)
            if number + 1 < SLICES:
                # Not ahead of the additions: registers have no room for two slices beside those of 32 heads.
                current = slice_of_keys(weights, gradient, of_row, only, number + 1)
    # The second group passes its sums on in its buffer of keys, in fp32: 64 keys are as large as 32 heads.
    sums: gl.constexpr = gl.SwizzledSharedLayout(8, 32 // HEADS, HEADS // 8, [1, 0])
    LAST: gl.constexpr = 64 // HEADS - 1
    value_sums = seen_as(k_value, gl.float32, [64 // HEADS, VALUE, HEADS], sums).index(LAST)
    tail_sums = seen_as(k_tail, gl.float32, [64 // HEADS, TAIL, HEADS], sums).index(LAST)
    if GROUP == 1:
        value_sums.store(acc_value)
        tail_sums.store(acc_tail)
        mbarrier.arrive(done)
    else:
        mbarrier.wait(done, 0)
        store_heads(grad_query, heads, acc_value + value_sums.load(layout), 0)
        store_heads(grad_query, heads, acc_tail + tail_sums.load(layout), VALUE)


@gluon.jit(do_not_specialize=["first_row"])
def hopper_backward_few_heads_kernel(
    query,
    key_value,
    indices,
    lengths,
    grad_out,
    lse,
    delta,
    grad_query,
    grad_keys,
    attention_sum,
    first_row,
    rows_per_batch,
    key_length,
    heads,
    topk,
    query_batch,
    query_row,
    query_head,
    key_batch,
    key_row,
    grad_batch,
    grad_row,
    grad_head,
    softmax_scale,
    scale_log2,
    HEADS: gl.constexpr,
    WITH_SUM: gl.constexpr,
    ORDERED: gl.constexpr,
    ATOMIC: gl.constexpr,
):
    """Compute all gradients of up to HEADS heads, 16 or 32; one program per row.

    Arguments are as in ``hopper_backward_rows_kernel``, and ``attention_sum`` is written once.
    """
    turn = gl.program_id(0).to(gl.int64)
    row = first_row + turn
    base, keys, length = place_of_row(
        row, query, key_value, lengths, rows_per_batch, query_batch, query_row, key_batch
    )
    batch = row // rows_per_batch
    grad_base = grad_out + batch * grad_batch + (row % rows_per_batch) * grad_row

    dtype: gl.constexpr = query.dtype.element_ty
    narrow: gl.constexpr = gl.NVMMASharedLayout(2 * HEADS, 16, 2)
    tiles = (
        gl.allocate_shared_memory(dtype, [1, HEADS, VALUE], TILE),  # queries
        gl.allocate_shared_memory(dtype, [1, HEADS, TAIL], TILE),
        gl.allocate_shared_memory(dtype, [1, HEADS, VALUE], TILE),  # output gradients
        gl.allocate_shared_memory(dtype, [2, BLOCK, VALUE], TILE),  # keys
        gl.allocate_shared_memory(dtype, [2, BLOCK, TAIL], TILE),
        gl.allocate_shared_memory(dtype, [2, BLOCK, HEADS], narrow),  # gradients of scores, [keys, heads]
    )
    # Queries and output gradients copied, keys copied, second group's sums stored.
    barriers = (barrier_of(2 * COPYING), barriers_of(2, COPYING), barrier_of(1))
    scales = (softmax_scale, scale_log2)
    place = turn if ORDERED else row
    attended = (indices + place * topk, length, key_length)
    of_heads = (lse + row * heads, delta + row * heads, heads)
    queries = (base, query_head, grad_base, grad_head)
    target = target_of(grad_keys, turn * topk, batch * key_length, ORDERED)
    out = grad_query + place * heads * (VALUE + TAIL)
    results = (out, target, attention_sum + place * topk)
    operands = (queries, of_heads, (keys, key_row))
    gl.warp_specialize(
        [
            (
                take_tiles,
                (attended, operands, results, scales, tiles, barriers, 0, HEADS, WITH_SUM, ORDERED, ATOMIC),
            ),
            (
                take_tiles,
                (attended, operands, results, scales, tiles, barriers, 1, HEADS, WITH_SUM, ORDERED, ATOMIC),
            ),
        ],
        [4],
        [256],
    )
