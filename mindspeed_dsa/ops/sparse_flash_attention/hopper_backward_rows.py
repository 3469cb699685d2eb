"""Gradients of sparse flash attention for many heads on Hopper, in Gluon.

A program processes one row and 64 heads. Queries and output gradients of a row stay in shared memory, and
tiles of 64 keys stream through. Two warp groups have separate roles. The first gathers keys and computes
probabilities and gradients of scores, which the second reads from shared memory. The second computes the
gradients of these keys, 64 columns at a time, and adds them to memory while its next columns are multiplied:
these additions bound the kernel's speed. Both keep the gradient of the queries in registers, about half of
its columns each.

Entries that are no keys are gathered as zeros: they contribute nothing to the queries' gradient, and their
own gradients are not added. Each warp group has the maximum of 256 registers per thread, and does not spill
in a loop.
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

from mindspeed_dsa.ops.sparse_flash_attention.hopper_common import (
    BLOCK,
    COPIES,
    COPYING,
    LOG2E,
    TAIL,
    TILE,
    VALUE,
    barrier_of,
    copy_rows,
    kept_inside,
    load_indices,
    place_of_row,
    power_of_two,
    seen_as,
)
from mindspeed_dsa.ops.sparse_flash_attention.hopper_forward import HALF, OUTPUT, SCORES

# Columns of a key's gradient per product.
SLICE: gl.constexpr = gl.constexpr(64)
SLICES: gl.constexpr = gl.constexpr((VALUE.value + TAIL.value) // SLICE.value)
# Keys per score product: next to the queries' gradient, registers have no room for the scores of all 64.
FEW: gl.constexpr = gl.constexpr(32)
FEW_SCORES: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FEW.value, 16]))
NARROW: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))


@gluon.jit
def entries_of(row_indices, first, length, layout: gl.constexpr, COUNT: gl.constexpr):
    """Load entries of a row from ``first`` on, -1 past its last key."""
    place = first + gl.arange(0, COUNT, layout=layout)
    return gl.load(row_indices + place, mask=place < length, other=-1)


@gluon.jit
def gather_keys(entries, keys, key_row, key_length, k_value, k_tail, key_full):
    """Copy keys of a tile to shared memory, zeros for entries that are no keys."""
    for few in gl.static_range(2):
        index = entries[few]
        valid = (index >= 0) & (index < key_length)
        starts = keys + index.to(gl.int64) * key_row
        copy_rows(k_value.index(few), starts, valid, 0, VALUE)
        copy_rows(k_tail.index(few), starts, valid, VALUE, TAIL)
    async_copy.mbarrier_arrive(key_full, increment_count=False)


@gluon.jit
def store_columns(target, first_head, heads, sums, FIRST: gl.constexpr):
    """Store columns of the query gradient of a row; padding heads are skipped."""
    layout: gl.constexpr = sums.type.layout
    head = first_head + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    column = FIRST + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout))
    offsets = head.to(gl.int64)[:, None] * (VALUE + TAIL) + column[None, :]
    gl.store(target + offsets, sums.to(target.dtype.element_ty), mask=(head < heads)[:, None])


@gluon.jit
def score_tiles(row, queries, of_heads, keys, results, scales, tiles, barriers, WITH_SUM: gl.constexpr):
    """Code of the first warp group: gather keys, compute scores, their gradients, half of query gradients."""
    row_indices, length, key_length = row
    base, query_head, grad_base, grad_head = queries
    lse, delta, first_head, heads = of_heads
    key_value, key_row = keys
    grad_query, attention_sum = results
    softmax_scale, scale_log2 = scales
    q_value, q_tail, grad_value, k_value, k_tail, probabilities, gradients = tiles
    row_full, key_full, key_empty, ready, consumed = barriers
    copied: gl.constexpr = gl.SliceLayout(1, COPIES)
    head = first_head + gl.arange(0, BLOCK, layout=copied)
    is_head = head < heads
    starts = base + head.to(gl.int64) * query_head
    copy_rows(q_value.index(0), starts, is_head, 0, VALUE)
    copy_rows(q_tail.index(0), starts, is_head, VALUE, TAIL)
    copy_rows(grad_value.index(0), grad_base + head.to(gl.int64) * grad_head, is_head, 0, VALUE)
    async_copy.mbarrier_arrive(row_full, increment_count=False)
    entries = (
        entries_of(row_indices, 0, length, copied, FEW),
        entries_of(row_indices, FEW, length, copied, FEW),
    )
    gather_keys(entries, key_value, key_row, key_length, k_value, k_tail, key_full)
    head = first_head + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, FEW_SCORES))
    dtype: gl.constexpr = q_value.dtype
    probabilities = seen_as(probabilities, dtype, [2, BLOCK, FEW], NARROW)
    gradients = seen_as(gradients, dtype, [2, BLOCK, FEW], NARROW)
    norm = gl.load(lse + head, mask=head < heads, other=float("inf")) * LOG2E
    row_delta = gl.load(delta + head, mask=head < heads, other=0.0) * softmax_scale
    acc_value = gl.full([BLOCK, HALF], 0.0, gl.float32, layout=OUTPUT)
    acc_tail = gl.full([BLOCK, TAIL], 0.0, gl.float32, layout=SCORES)
    mbarrier.wait(row_full, 0)
    tiles_of_row = gl.cdiv(length, BLOCK)
    for tile in range(tiles_of_row):
        phase = tile & 1
        first = (tile + 1) * BLOCK
        following = (
            entries_of(row_indices, first, length, copied, FEW),
            entries_of(row_indices, first + FEW, length, copied, FEW),
        )
        mbarrier.wait(key_full, phase)
        fence_async_shared()
        for few in range(kept_inside(2)):
            none = gl.full([BLOCK, FEW], 0.0, gl.float32, layout=FEW_SCORES)
            only = kept_inside(0)
            value = k_value.index(few).permute((1, 0))
            # [heads, keys] each
            scores = warpgroup_mma(q_value.index(only), value, none, use_acc=False, is_async=True)
            scores = warpgroup_mma(
                q_tail.index(only), k_tail.index(few).permute((1, 0)), scores, is_async=True
            )
            inner = warpgroup_mma(grad_value.index(only), value, none, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            # Clamped to 1 also for entries that are no keys: an infinite gradient times their zeros would be
            # NaN. A NaN score stays NaN, which `gl.minimum` alone would replace by the other operand.
            exponent = scores * scale_log2 - norm[:, None]
            weight = power_of_two(gl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))
            if WITH_SUM:
                columns: gl.constexpr = gl.SliceLayout(0, FEW_SCORES)
                begin = tile * BLOCK + few * FEW
                key = entries_of(row_indices, begin, length, columns, FEW)
                # At most two programs add to a row, so the order does not matter.
                gl.atomic_add(
                    attention_sum + begin + gl.arange(0, FEW, layout=columns),
                    gl.sum(weight, axis=0),
                    mask=(key >= 0) & (key < key_length),
                    sem="relaxed",
                )
            inner = warpgroup_mma_wait(0, deps=(inner,))
            gradient = weight * (inner * softmax_scale - row_delta[:, None])
            mbarrier.wait(consumed, phase ^ 1)
            probabilities.index(few).store(weight.to(dtype))
            gradients.index(few).store(gradient.to(dtype))
        fence_async_shared()
        mbarrier.arrive(ready)
        only = kept_inside(0)
        for few in gl.static_range(2):
            gradient = gradients.index(few)
            acc_value = warpgroup_mma(
                gradient, k_value.index(only + few).slice(0, HALF, 1), acc_value, is_async=True
            )
            acc_tail = warpgroup_mma(gradient, k_tail.index(only + few), acc_tail, is_async=True)
        acc_value, acc_tail = warpgroup_mma_wait(0, deps=(acc_value, acc_tail))
        mbarrier.wait(key_empty, phase)
        if tile + 1 < tiles_of_row:
            gather_keys(following, key_value, key_row, key_length, k_value, k_tail, key_full)
    store_columns(grad_query, first_head, heads, acc_value, 0)
    store_columns(grad_query, first_head, heads, acc_tail, VALUE)


@gluon.jit
def slice_of_keys(tiles, only, NUMBER: gl.constexpr):
    """Start computing ``SLICE`` columns of the gradients of a tile's keys, ``[keys, columns]``."""
    q_value, q_tail, grad_value, _k_value, _k_tail, probabilities, gradients = tiles
    acc = gl.full([BLOCK, SLICE], 0.0, gl.float32, layout=SCORES)
    gradient = gradients.index(only).permute((1, 0))
    if NUMBER * SLICE < VALUE:
        grad_slice = grad_value.index(only).slice(NUMBER * SLICE, SLICE, 1)
        weights = probabilities.index(only).permute((1, 0))
        acc = warpgroup_mma(weights, grad_slice, acc, use_acc=False, is_async=True)
        query = q_value.index(only).slice(NUMBER * SLICE, SLICE, 1)
        return warpgroup_mma(gradient, query, acc, is_async=True)
    # The output has no rotary columns, so only the scores' gradient contributes.
    return warpgroup_mma(gradient, q_tail.index(only), acc, use_acc=False, is_async=True)


def _places(registers, threads):
    """Return a register layout for :func:`add_slice`, in which columns are in memory order."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], registers, [0, 32]],
        [[0, 4], [0, 8], [1, 0], [2, 0], threads],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )


# As a product leaves them, and with 128 contiguous bytes of a row in eight threads.
PLACED: gl.constexpr = gl.constexpr(_places([0, 16], [4, 0]))
LINES: gl.constexpr = gl.constexpr(_places([4, 0], [0, 16]))


@gluon.jit
def target_of(grad_keys, entries, keys, ORDERED: gl.constexpr):
    """Return where key gradients begin: with ORDERED those of a row's entries, otherwise those of its keys.

    ``entries`` and ``keys`` are the numbers of those before.
    """
    if ORDERED:
        return grad_keys + entries * (VALUE + TAIL)
    return grad_keys + keys * (VALUE + TAIL)


@gluon.jit
def starts_of(index, tile, ORDERED: gl.constexpr):
    """Return where the key gradients of a tile begin: with ORDERED by entry of the row, otherwise by key."""
    if ORDERED:
        place = tile * BLOCK + gl.arange(0, BLOCK, layout=index.type.layout)
    else:
        place = index.to(gl.int64)
    return place * (VALUE + TAIL)


@gluon.jit
def add_slice(grad_keys, starts, index, key_length, sums, FIRST: gl.constexpr, ATOMIC: gl.constexpr):
    """Store 64 columns of key gradients, or atomically add them; rows without a key are skipped.

    After a product, a thread has columns ``2i``, ``2i + 1``, ``2i + 8`` and ``2i + 9`` of every 16. They are
    stored next to each other, so that the thread adds them with one instruction; ``hopper.in_order`` restores
    the order of columns later. Threads also exchange half of their rows, so that eight threads hold 128
    contiguous bytes of a row.
    """
    # [keys, 16-column group, half, thread, number] -> [keys, group, thread, half, number]
    apart = gl.permute(gl.reshape(sums, [BLOCK, SLICE // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    placed = gl.convert_layout(gl.reshape(apart, [BLOCK, SLICE]), PLACED, assert_trivial=True)
    placed = gl.convert_layout(placed, LINES)
    place = FIRST + gl.arange(0, SLICE, layout=gl.SliceLayout(0, LINES))
    valid = ((index >= 0) & (index < key_length))[:, None]
    target = grad_keys + starts[:, None] + place[None, :]
    if ATOMIC:
        gl.atomic_add(target, placed, mask=valid, sem="relaxed")
    else:
        gl.store(target, placed, mask=valid)


@gluon.jit
def add_tiles(row, queries, results, tiles, barriers, ORDERED: gl.constexpr, ATOMIC: gl.constexpr):
    """Code of the second warp group: compute and add key gradients, and half of query gradients."""
    row_indices, length, key_length = row
    first_head, heads = queries
    grad_query, grad_keys = results
    _q_value, _q_tail, _grad_value, k_value, _k_tail, _probabilities, gradients = tiles
    key_empty, ready, consumed = barriers
    acc = gl.full([BLOCK, HALF], 0.0, gl.float32, layout=OUTPUT)
    rows: gl.constexpr = gl.SliceLayout(1, LINES)
    few_gradients = seen_as(gradients, gradients.dtype, [2, BLOCK, FEW], NARROW)
    for tile in range(gl.cdiv(length, BLOCK)):
        index = load_indices(row_indices, tile, length, rows)
        starts = starts_of(index, tile, ORDERED)
        # The group that arrives here has waited for all copies, and has fenced them.
        mbarrier.wait(ready, tile & 1)
        only = kept_inside(0)
        current = slice_of_keys(tiles, only, 0)
        for few in gl.static_range(2):
            values = k_value.index(only + few).slice(HALF, HALF, 1)
            acc = warpgroup_mma(few_gradients.index(few), values, acc, is_async=True)
        for number in gl.static_range(SLICES - 1):
            following = slice_of_keys(tiles, only, number + 1)
            if number == 0:
                # Still running: two products for the queries' gradient, and two for the next columns.
                current = warpgroup_mma_wait(4, deps=(current,))
            elif number == 1:
                current, acc = warpgroup_mma_wait(2, deps=(current, acc))
                mbarrier.arrive(key_empty)
            elif number + 2 < SLICES:
                current = warpgroup_mma_wait(2, deps=(current,))
            else:
                current, following = warpgroup_mma_wait(0, deps=(current, following))
                mbarrier.arrive(consumed)
            add_slice(grad_keys, starts, index, key_length, current, number * SLICE, ATOMIC)
            current = following
        add_slice(grad_keys, starts, index, key_length, current, (SLICES - 1) * SLICE, ATOMIC)
    store_columns(grad_query, first_head, heads, acc, HALF)


@gluon.jit(do_not_specialize=["first_row"])
def hopper_backward_rows_kernel(
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
    WITH_SUM: gl.constexpr,
    ORDERED: gl.constexpr,
    ATOMIC: gl.constexpr,
):
    """Compute all gradients; one program per row and 64 heads; keys have 512 + 64 two-byte numbers.

    ``grad_query`` is ``[rows, heads, 576]``, and ``attention_sum`` ``[rows, topk]`` fp32, which is added to.
    ``grad_keys`` is ``[batch * key_length, 576]`` fp32. With ORDERED, it is ``[programs' rows, topk, 576]``,
    and ``indices``, ``grad_query`` and ``attention_sum`` have the programs' rows only. Without ATOMIC,
    ``grad_keys`` is written once.
    """
    head_blocks = gl.cdiv(heads, BLOCK)
    turn = (gl.program_id(0) // head_blocks).to(gl.int64)
    row = first_row + turn
    first_head = (gl.program_id(0) % head_blocks) * BLOCK
    base, keys, length = place_of_row(
        row, query, key_value, lengths, rows_per_batch, query_batch, query_row, key_batch
    )
    batch = row // rows_per_batch
    grad_base = grad_out + batch * grad_batch + (row % rows_per_batch) * grad_row

    dtype: gl.constexpr = query.dtype.element_ty
    tiles = (
        gl.allocate_shared_memory(dtype, [1, BLOCK, VALUE], TILE),  # queries
        gl.allocate_shared_memory(dtype, [1, BLOCK, TAIL], TILE),
        gl.allocate_shared_memory(dtype, [1, BLOCK, VALUE], TILE),  # output gradients
        gl.allocate_shared_memory(dtype, [2, FEW, VALUE], TILE),  # keys
        gl.allocate_shared_memory(dtype, [2, FEW, TAIL], TILE),
        gl.allocate_shared_memory(dtype, [1, BLOCK, BLOCK], NARROW),  # probabilities, [heads, keys]
        gl.allocate_shared_memory(dtype, [1, BLOCK, BLOCK], NARROW),  # gradients of scores, [heads, keys]
    )
    row_full, key_full = barrier_of(COPYING), barrier_of(COPYING)
    key_empty, ready, consumed = barrier_of(1), barrier_of(1), barrier_of(1)
    barriers = (row_full, key_full, key_empty, ready, consumed)
    scales = (softmax_scale, scale_log2)
    place = turn if ORDERED else row
    attended = (indices + place * topk, length, key_length)
    of_heads = (lse + row * heads, delta + row * heads, first_head, heads)
    queries = (base, query_head, grad_base, grad_head)
    out = grad_query + place * heads * (VALUE + TAIL)
    summed = attention_sum + place * topk
    target = target_of(grad_keys, turn * topk, batch * key_length, ORDERED)
    gl.warp_specialize(
        [
            (
                score_tiles,
                (
                    attended,
                    queries,
                    of_heads,
                    (keys, key_row),
                    (out, summed),
                    scales,
                    tiles,
                    barriers,
                    WITH_SUM,
                ),
            ),
            (
                add_tiles,
                (
                    attended,
                    (first_head, heads),
                    (out, target),
                    tiles,
                    (key_empty, ready, consumed),
                    ORDERED,
                    ATOMIC,
                ),
            ),
        ],
        [4],
        [256],
    )
