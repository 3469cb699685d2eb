"""Kernel for Hopper, in Gluon, that sums sparse attention's probabilities over heads.

A program holds one row's queries for up to 128 heads and gathers each of the row's keys once, in nine buffers
of 64 columns. A buffer is refilled as soon as its columns have been multiplied. One warp group gathers. Two
warp groups alternate in multiplying tiles of 64 keys, so that the exponentials of one tile overlap with the
products of the other.
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
    TILE,
    barrier_of,
    barriers_of,
    copy_rows,
    load_indices,
    place_of_row,
    power_of_two,
)

# Pieces of a key, and columns per piece: 9 x 64 = 576.
PIECES: gl.constexpr = gl.constexpr(9)
WIDTH: gl.constexpr = gl.constexpr(64)


@gluon.jit
def gather_pieces(
    row, base, query_head, heads, keys, key_row, queries, pieces, barriers, HEADS: gl.constexpr
):
    """Code of the copying warp group: copy the queries, then the columns of each tile of keys."""
    row_indices, length, key_length = row
    query_full, full, empty = barriers
    layout: gl.constexpr = gl.SliceLayout(1, COPIES)
    head = gl.arange(0, HEADS, layout=layout)
    query_starts = base + head.to(gl.int64) * query_head
    for piece in gl.static_range(PIECES):
        copy_rows(queries.index(piece), query_starts, head < heads, piece * WIDTH, WIDTH)
    async_copy.mbarrier_arrive(query_full, increment_count=False)
    index = load_indices(row_indices, 0, length, layout)
    for tile in range(gl.cdiv(length, BLOCK)):
        following = load_indices(row_indices, tile + 1, length, layout)
        valid = (index >= 0) & (index < key_length)
        starts = keys + index.to(gl.int64) * key_row
        for piece in gl.static_range(PIECES):
            mbarrier.wait(empty.index(piece), (tile & 1) ^ 1)
            copy_rows(pieces.index(piece), starts, valid, piece * WIDTH, WIDTH)
            async_copy.mbarrier_arrive(full.index((tile & 1) * PIECES + piece), increment_count=False)
        index = following


@gluon.jit
def sum_tiles(row, results, queries, pieces, barriers, scale_log2, GROUP: gl.constexpr, HEADS: gl.constexpr):
    """Code of a multiplying warp group: process every second tile, starting at tile ``GROUP``."""
    row_indices, length, key_length = row
    row_lse, row_sum, heads, topk = results
    query_full, full, empty = barriers
    # [keys, heads]: a sum over heads stays within four threads.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, layout))
    norm = gl.load(row_lse + head, mask=head < heads, other=float("inf")) * LOG2E
    mbarrier.wait(query_full, 0)
    for tile in range(GROUP, gl.cdiv(topk, BLOCK), 2):
        position = tile * BLOCK + gl.arange(0, BLOCK, layout=rows)
        summed = gl.full([BLOCK], 0.0, gl.float32, layout=rows)
        if tile * BLOCK < length:
            index = load_indices(row_indices, tile, length, rows)
            phase = (tile >> 1) & 1
            scores = gl.full([BLOCK, HEADS], 0.0, gl.float32, layout=layout)
            for piece in gl.static_range(PIECES):
                mbarrier.wait(full.index(GROUP * PIECES + piece), phase)
                fence_async_shared()
                scores = warpgroup_mma(
                    pieces.index(piece), queries.index(piece).permute((1, 0)), scores,
                    use_acc=piece > 0, is_async=True,
                )  # fmt: skip
                if piece > 0:
                    scores = warpgroup_mma_wait(1, deps=(scores,))
                    mbarrier.arrive(empty.index(piece - 1))
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(empty.index(PIECES - 1))
            probabilities = power_of_two(scores * scale_log2 - norm[None, :])
            valid = (index >= 0) & (index < key_length)
            summed = gl.where(valid, gl.sum(probabilities, axis=1), 0.0)
        gl.store(row_sum + position, summed, mask=position < topk)


@gluon.jit
def hopper_attention_sum_kernel(
    query,
    key_value,
    indices,
    lengths,
    lse,
    attention_sum,
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
    HEADS: gl.constexpr,
):
    """Sum probabilities over all heads; one program per row; keys have 576 two-byte numbers."""
    row = gl.program_id(0).to(gl.int64)
    base, keys, length = place_of_row(
        row, query, key_value, lengths, rows_per_batch, query_batch, query_row, key_batch
    )

    dtype: gl.constexpr = query.dtype.element_ty
    queries = gl.allocate_shared_memory(dtype, [PIECES, HEADS, WIDTH], TILE)
    pieces = gl.allocate_shared_memory(dtype, [PIECES, BLOCK, WIDTH], TILE)
    # Queries copied; pieces of two tiles copied; pieces read.
    barriers = (barrier_of(COPYING), barriers_of(2 * PIECES, COPYING), barriers_of(PIECES, 1))
    summed = (indices + row * topk, length, key_length)
    results = (lse + row * heads, attention_sum + row * topk, heads, topk)
    gl.warp_specialize(
        [
            (sum_tiles, (summed, results, queries, pieces, barriers, scale_log2, 0, HEADS)),
            (sum_tiles, (summed, results, queries, pieces, barriers, scale_log2, 1, HEADS)),
            (
                gather_pieces,
                (summed, base, query_head, heads, keys, key_row, queries, pieces, barriers, HEADS),
            ),
        ],
        [4, 4],
        [216, 72],
    )
