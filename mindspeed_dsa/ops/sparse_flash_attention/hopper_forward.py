"""Forward of sparse flash attention on Hopper, in Gluon, with warp-specialized gather and products.

A program attends to one row's keys for 64 heads. One warp group gathers keys, 64 at a time, alternately into
two buffers. Two warp groups multiply. Group g (0 or 1) computes the scores for the tiles in buffer g, which
are every second tile. For all tiles, it computes half g of the output's columns, and gets the other group's
probabilities through shared memory. While one group normalizes, the other group's products run. Each half of
a buffer is refilled as soon as the group that owns its columns has read it.

A tile's probabilities overwrite the rotary columns of its keys: both are 64 x 64 numbers, and no product
needs these columns once the probabilities exist. The groups pass the row maxima on in the order of the tiles,
so that all probabilities of a row are relative to the running maximum, as in the plain kernel.
"""

from __future__ import annotations

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
    VECTOR,
    barrier_of,
    barriers_of,
    copy_rows,
    kept_inside,
    load_indices,
    place_of_row,
    power_of_two,
)

# Columns of half a value. A program has as many heads as a tile has keys.
HALF: gl.constexpr = gl.constexpr(256)
SCORES: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
PROBABILITIES: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))
STORES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def gather(row, queries, keys, key_row, tiles, barriers):
    """Code of the copying warp group: copy the queries, then all tiles of keys."""
    row_indices, length, key_length = row
    base, query_head, first_head, heads = queries
    query_left, query_right, query_tail, left, right, tail = tiles
    query_full, full_left, full_right, empty_left, empty_right, _ready, _done = barriers
    layout: gl.constexpr = gl.SliceLayout(1, COPIES)
    head = first_head + gl.arange(0, BLOCK, layout=layout)
    starts = base + head.to(gl.int64) * query_head
    is_head = head < heads
    copy_rows(query_left, starts, is_head, 0, HALF)
    copy_rows(query_right, starts, is_head, HALF, HALF)
    copy_rows(query_tail, starts, is_head, 2 * HALF, TAIL)
    async_copy.mbarrier_arrive(query_full, increment_count=False)
    index = load_indices(row_indices, 0, length, layout)  # [BLOCK], one tile ahead of the copies
    for pair in range(gl.cdiv(length, 2 * BLOCK)):
        phase = (pair & 1) ^ 1
        for buffer in gl.static_range(2):
            following = load_indices(row_indices, 2 * pair + buffer + 1, length, layout)
            valid = (index >= 0) & (index < key_length)
            starts = keys + index.to(gl.int64) * key_row
            mbarrier.wait(empty_left.index(buffer), phase)
            copy_rows(left.index(buffer), starts, valid, 0, HALF)
            # The tail's memory is free once the other group has read the probabilities stored there.
            if buffer == 1:
                copy_rows(tail.index(buffer), starts, valid, 2 * HALF, TAIL)
            async_copy.mbarrier_arrive(full_left.index(buffer), increment_count=False)
            mbarrier.wait(empty_right.index(buffer), phase)
            copy_rows(right.index(buffer), starts, valid, HALF, HALF)
            if buffer == 0:
                copy_rows(tail.index(buffer), starts, valid, 2 * HALF, TAIL)
            async_copy.mbarrier_arrive(full_right.index(buffer), increment_count=False)
            index = following


@gluon.jit
def shrunk(acc, shrink):
    """Return ``acc * shrink``, with one factor per row."""
    return acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]


@gluon.jit
def times_others_values(acc, highest, total, probabilities, values, maxima, ready, phase):
    """Start to add the other group's probabilities times this group's value columns to ``acc``.

    Rescales ``acc`` and ``total`` to the row maxima of the other group, and returns both with these maxima.
    """
    mbarrier.wait(ready, phase)
    higher = maxima.load(gl.SliceLayout(1, SCORES))
    shrink = power_of_two(highest - higher)
    acc = warpgroup_mma(probabilities, values, shrunk(acc, shrink), is_async=True)
    return acc, higher, total * shrink


@gluon.jit
def attend(row, results, tiles, barriers, maxima, sums, scale_log2, GROUP: gl.constexpr):
    """Code of warp group ``GROUP``: scores of the tiles in its buffer, and its half of the output columns."""
    row_indices, length, key_length = row
    out, lse, first_head, heads = results
    query_left, query_right, query_tail, left, right, tail = tiles
    query_full, full_left, full_right, empty_left, empty_right, ready, done = barriers
    OTHER: gl.constexpr = 1 - GROUP
    if GROUP == 0:
        values, empty = left, empty_left
    else:
        values, empty = right, empty_right
    # A finite start: a tile without a valid key must not compute inf - inf.
    highest = gl.full([BLOCK], -1.0e30, gl.float32, layout=gl.SliceLayout(1, SCORES))
    total = gl.full([BLOCK], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    acc = gl.full([BLOCK, HALF], 0.0, gl.float32, layout=OUTPUT)
    mbarrier.wait(query_full, 0)
    for pair in range(gl.cdiv(length, 2 * BLOCK)):
        phase = pair & 1
        scores = gl.full([BLOCK, BLOCK], 0.0, gl.float32, layout=SCORES)
        own = kept_inside(GROUP)
        mbarrier.wait(full_left.index(GROUP), phase)
        fence_async_shared()
        scores = warpgroup_mma(
            query_left, left.index(own).permute((1, 0)), scores, use_acc=False, is_async=True
        )
        mbarrier.wait(full_right.index(GROUP), phase)
        fence_async_shared()
        # After the fence, because the fence waits for the thread's outstanding loads.
        index = load_indices(row_indices, 2 * pair + GROUP, length, gl.SliceLayout(0, SCORES))
        scores = warpgroup_mma(query_right, right.index(own).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma(query_tail, tail.index(own).permute((1, 0)), scores, is_async=True)
        if GROUP == 1:
            # After its own scores, so that the softmax of those overlaps with this product.
            acc, highest, total = times_others_values(
                acc, highest, total, tail.index(OTHER), values.index(OTHER), maxima.index(OTHER),
                ready.index(OTHER), phase,
            )  # fmt: skip
        scores = warpgroup_mma_wait(GROUP, deps=(scores,))
        valid = (index >= 0) & (index < key_length)
        scores = gl.where(valid[None, :], scores * scale_log2, float("-inf"))
        higher = gl.maximum(highest, gl.max(scores, axis=1))
        probabilities = power_of_two(scores - higher[:, None])
        shrink = power_of_two(highest - higher)
        total = total * shrink + gl.sum(probabilities, axis=1)
        highest = higher
        rounded = probabilities.to(query_left.dtype)
        maxima.index(GROUP).store(highest)
        tail.index(GROUP).store(rounded)
        fence_async_shared()
        mbarrier.arrive(ready.index(GROUP))
        if GROUP == 1:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(OTHER))
        rounded = gl.convert_layout(rounded, PROBABILITIES)
        acc = warpgroup_mma(rounded, values.index(GROUP), shrunk(acc, shrink), is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(GROUP))
        if GROUP == 0:
            acc, highest, total = times_others_values(
                acc, highest, total, tail.index(OTHER), values.index(OTHER), maxima.index(OTHER),
                ready.index(OTHER), phase,
            )  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(OTHER))
    # Each group has summed the probabilities of its own tiles only.
    sums.index(GROUP).store(total)
    mbarrier.arrive(done.index(GROUP))
    mbarrier.wait(done.index(OTHER), 0)
    total += sums.index(OTHER).load(gl.SliceLayout(1, SCORES))
    is_empty = total == 0
    divisor = gl.where(is_empty, 1.0, total)
    if GROUP == 0:
        head = first_head + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, SCORES))
        natural = (highest + gl.log2(divisor)) / LOG2E
        gl.store(lse + head, gl.where(is_empty, float("-inf"), natural), mask=head < heads)
    acc = shrunk(acc, 1.0 / divisor)
    # Rows pass through the first buffer, whose half no other group reads any more, to be stored as whole
    # lines.
    values.index(0).store(acc.to(query_left.dtype))
    head = first_head + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, STORES))
    column = GROUP * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, STORES))
    offsets = head.to(gl.int64)[:, None] * (2 * HALF) + column[None, :]
    gl.store(out + offsets, values.index(0).load(STORES), mask=(head < heads)[:, None])


@gluon.jit
def hopper_forward_kernel(
    query,
    key_value,
    indices,
    lengths,
    out,
    lse,
    rows_per_batch,
    key_length,
    heads,
    topk,
    query_batch,
    query_row,
    query_head,
    key_batch,
    key_row,
    scale_log2,
):
    """Compute output and lse; one program per row and 64 heads; keys have 512 + 64 numbers of two bytes."""
    head_blocks = gl.cdiv(heads, BLOCK)
    row = (gl.program_id(0) // head_blocks).to(gl.int64)
    first_head = (gl.program_id(0) % head_blocks) * BLOCK
    base, keys, length = place_of_row(
        row, query, key_value, lengths, rows_per_batch, query_batch, query_row, key_batch
    )

    dtype: gl.constexpr = query.dtype.element_ty
    query_left = gl.allocate_shared_memory(dtype, [BLOCK, HALF], TILE)
    query_right = gl.allocate_shared_memory(dtype, [BLOCK, HALF], TILE)
    query_tail = gl.allocate_shared_memory(dtype, [BLOCK, TAIL], TILE)
    left = gl.allocate_shared_memory(dtype, [2, BLOCK, HALF], TILE)
    right = gl.allocate_shared_memory(dtype, [2, BLOCK, HALF], TILE)
    tail = gl.allocate_shared_memory(dtype, [2, BLOCK, TAIL], TILE)
    maxima = gl.allocate_shared_memory(gl.float32, [2, BLOCK], VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [2, BLOCK], VECTOR)
    barriers = (
        barrier_of(COPYING),  # queries have been copied
        barriers_of(2, COPYING),  # left halves of keys have been copied; right halves have been copied
        barriers_of(2, COPYING),
        barriers_of(2, 1),  # left halves have been read; right halves have been read
        barriers_of(2, 1),
        barriers_of(2, 1),  # a tile's probabilities are stored
        barriers_of(2, 1),  # a group's sums are stored
    )

    tiles = (query_left, query_right, query_tail, left, right, tail)
    attended = (indices + row * topk, length, key_length)
    queries = (base, query_head, first_head, heads)
    results = (out + row * heads * (2 * HALF), lse + row * heads, first_head, heads)
    gl.warp_specialize(
        [
            (attend, (attended, results, tiles, barriers, maxima, sums, scale_log2, 0)),
            (attend, (attended, results, tiles, barriers, maxima, sums, scale_log2, 1)),
            (gather, (attended, queries, keys, key_row, tiles, barriers)),
        ],
        [4, 4],
        [216, 72],
    )
