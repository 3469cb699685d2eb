"""Forward of sparse flash attention for up to 16 heads on Hopper, in Gluon.

With few heads, the gather takes longer than the products. The 64 rows of a product's operand would be mostly
padding if they were heads. So keys form the rows of the scores, the value's columns form the rows of the
output, and heads form the columns of both. One warp group gathers into two buffers. Two warp groups attend to
every second tile of keys each, with their own maxima, sums and output, and merge them once at the end.
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
    VALUE,
    VECTOR,
    barrier_of,
    barriers_of,
    copy_rows,
    group_barrier,
    load_indices,
    place_of_row,
    power_of_two,
)

# Heads per program, the smallest number of columns of a product.
HEADS: gl.constexpr = gl.constexpr(16)


@gluon.jit
def gather_tiles(row, base, query_head, heads, keys, key_row, tiles, barriers):
    """Code of the copying warp group: copy the queries, then all tiles of keys."""
    row_indices, length, key_length = row
    query_value, query_tail, value, tail, _probabilities = tiles
    query_full, full, empty, _done = barriers
    layout: gl.constexpr = gl.SliceLayout(1, COPIES)
    head = gl.arange(0, HEADS, layout=layout)
    query_starts = base + head.to(gl.int64) * query_head
    copy_rows(query_value, query_starts, head < heads, 0, VALUE)
    copy_rows(query_tail, query_starts, head < heads, VALUE, TAIL)
    async_copy.mbarrier_arrive(query_full, increment_count=False)
    index = load_indices(row_indices, 0, length, layout)
    for tile in range(gl.cdiv(length, BLOCK)):
        following = load_indices(row_indices, tile + 1, length, layout)
        valid = (index >= 0) & (index < key_length)
        starts = keys + index.to(gl.int64) * key_row
        buffer = tile & 1
        mbarrier.wait(empty.index(buffer), ((tile >> 1) & 1) ^ 1)
        copy_rows(value.index(buffer), starts, valid, 0, VALUE)
        copy_rows(tail.index(buffer), starts, valid, VALUE, TAIL)
        async_copy.mbarrier_arrive(full.index(buffer), increment_count=False)
        index = following


@gluon.jit
def attend_tiles(row, results, tiles, barriers, others, scale_log2, GROUP: gl.constexpr):
    """Code of a multiplying warp group: attend to every second tile, which is always in buffer ``GROUP``."""
    row_indices, length, key_length = row
    row_out, row_lse, heads = results
    query_value, query_tail, value, tail, probabilities = tiles
    query_full, full, empty, done = barriers
    maxima, sums, outputs = others
    # [keys, heads] and [columns of a value, heads]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    # A finite start: a tile without a valid key must not compute inf - inf.
    highest = gl.full([HEADS], -1.0e30, gl.float32, layout=columns)
    total = gl.full([HEADS], 0.0, gl.float32, layout=columns)
    acc = gl.full([VALUE, HEADS], 0.0, gl.float32, layout=layout)
    mbarrier.wait(query_full, 0)
    for tile in range(GROUP, gl.cdiv(length, BLOCK), 2):
        index = load_indices(row_indices, tile, length, gl.SliceLayout(1, layout))
        mbarrier.wait(full.index(GROUP), (tile >> 1) & 1)
        fence_async_shared()
        scores = gl.full([BLOCK, HEADS], 0.0, gl.float32, layout=layout)
        scores = warpgroup_mma(
            value.index(GROUP), query_value.permute((1, 0)), scores, use_acc=False, is_async=True
        )
        scores = warpgroup_mma(tail.index(GROUP), query_tail.permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        valid = (index >= 0) & (index < key_length)
        scores = gl.where(valid[:, None], scores * scale_log2, float("-inf"))
        higher = gl.maximum(highest, gl.max(scores, axis=0))
        exponentials = power_of_two(scores - higher[None, :])
        shrink = power_of_two(highest - higher)
        highest = higher
        probabilities.index(GROUP).store(exponentials.to(query_value.dtype))
        fence_async_shared()
        group_barrier()
        acc = acc * shrink[None, :]
        acc = warpgroup_mma(
            value.index(GROUP).permute((1, 0)), probabilities.index(GROUP), acc, is_async=True
        )
        total = total * shrink + gl.sum(exponentials, axis=0)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(GROUP))
    # Group 1 stores its partial softmax; group 0 rescales both to the common maximum and merges them.
    if GROUP == 1:
        maxima.store(highest)
        sums.store(total)
        outputs.store(acc)
        mbarrier.arrive(done)
    else:
        mbarrier.wait(done, 0)
        other_highest = maxima.load(columns)
        higher = gl.maximum(highest, other_highest)
        shrink = power_of_two(highest - higher)
        other_shrink = power_of_two(other_highest - higher)
        total = total * shrink + sums.load(columns) * other_shrink
        is_empty = total == 0
        divisor = gl.where(is_empty, 1.0, total)
        acc = acc * shrink[None, :] + outputs.load(layout) * other_shrink[None, :]
        acc = acc / divisor[None, :]
        head = gl.arange(0, HEADS, layout=columns)
        natural = (higher + gl.log2(divisor)) / LOG2E
        gl.store(row_lse + head, gl.where(is_empty, float("-inf"), natural), mask=head < heads)
        column = gl.arange(0, VALUE, layout=gl.SliceLayout(1, layout))
        gl.store(
            row_out + head[None, :] * VALUE + column[:, None],
            acc.to(query_value.dtype),
            mask=(head < heads)[None, :],
        )


@gluon.jit
def hopper_few_heads_forward_kernel(
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
    """Compute output and lse for up to 16 heads; one program per row; keys have 512 + 64 two-byte numbers."""
    row = gl.program_id(0).to(gl.int64)
    base, keys, length = place_of_row(
        row, query, key_value, lengths, rows_per_batch, query_batch, query_row, key_batch
    )

    dtype: gl.constexpr = query.dtype.element_ty
    narrow: gl.constexpr = gl.NVMMASharedLayout(2 * HEADS, 16, 2)
    query_value = gl.allocate_shared_memory(dtype, [HEADS, VALUE], TILE)
    query_tail = gl.allocate_shared_memory(dtype, [HEADS, TAIL], TILE)
    value = gl.allocate_shared_memory(dtype, [2, BLOCK, VALUE], TILE)
    tail = gl.allocate_shared_memory(dtype, [2, BLOCK, TAIL], TILE)
    probabilities = gl.allocate_shared_memory(dtype, [2, BLOCK, HEADS], narrow)
    maxima = gl.allocate_shared_memory(gl.float32, [HEADS], VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [HEADS], VECTOR)
    outputs = gl.allocate_shared_memory(gl.float32, [VALUE, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    # Queries copied, buffers copied, buffers read, second group's results stored.
    barriers = (barrier_of(COPYING), barriers_of(2, COPYING), barriers_of(2, 1), barrier_of(1))
    tiles = (query_value, query_tail, value, tail, probabilities)
    others = (maxima, sums, outputs)
    attended = (indices + row * topk, length, key_length)
    results = (out + row * heads * VALUE, lse + row * heads, heads)
    gl.warp_specialize(
        [
            (attend_tiles, (attended, results, tiles, barriers, others, scale_log2, 0)),
            (attend_tiles, (attended, results, tiles, barriers, others, scale_log2, 1)),
            (gather_tiles, (attended, base, query_head, heads, keys, key_row, tiles, barriers)),
        ],
        [4, 4],
        [216, 72],
    )
