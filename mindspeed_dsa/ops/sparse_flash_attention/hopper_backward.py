"""Gradients of keys and scores of sparse flash attention on Hopper, in Gluon.

The kernel computes the same as ``backward_keys_kernel``, with the same tiles. In addition, several rows may
share a tile. For the gradient of its keys, these rows are treated as one row with two or four times the
heads. One warp group copies the keys of the next tile, and queries and output gradients of the next heads.
Two warp groups multiply: each computes half of a tile's scores and owns half of the columns of the keys'
gradient. Programs are persistent and take tile after tile, so that the next tile is copied while the gradient
of this one is added to memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
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
    barriers_of,
    copy_rows,
    kept_inside,
    power_of_two,
)

# Number of buffers for queries and output gradients.
STAGES: gl.constexpr = gl.constexpr(2)
VALUE_SUMS: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
TAIL_SUMS: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))


@gluon.constexpr_function
def _added(columns, lines):
    """Return the layout in which sums are written to memory.

    In the final layout (``lines``), a thread has four adjacent columns, and eight threads together have 128
    contiguous bytes of a row. Without ``lines``, the layout is an intermediate step between the product's
    layout and the final one. Converting in two steps exchanges registers within a warp; in one step it would
    go through shared memory.
    """
    bits = [[0, 1 << bit] for bit in range(5, columns.bit_length() - 2)]
    row, column = [4, 0], [0, 16]
    registers, threads = ([row, *bits], column) if lines else ([column, *bits], row)
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], *registers],
        [[0, 8], [0, 4], [1, 0], [2, 0], threads],
        [[16, 0], [32, 0], [0, columns // 2]],
        [],
        [64, columns],
    )


@gluon.constexpr_function
def _stored(heads):
    """Return the register layout for storing score gradients, in which a thread's heads are adjacent."""
    groups = heads // 8
    bits = [[0, 1 << bit] for bit in range(groups.bit_length() - 1)]
    lanes = [[0, groups], [0, 2 * groups], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [*bits, [8, 0]], lanes, [[16, 0], [32, 0], [0, 4 * groups]], [], [64, heads]
    )


@gluon.jit
def tile_of(task, tiles):
    """Decode a task of ``tasks_of``: return its row in the chunk, first entry and number of sharing rows."""
    tile = task // 8
    return tile // tiles, tile % tiles * BLOCK, task % 8


@gluon.jit
def copy_tiles(inputs, sizes, strides, tiles, barriers, HEADS: gl.constexpr):
    """Code of the copying warp group: copy keys, and pairs of queries and output gradients."""
    query, key_value, indices, tasks, task_bounds, grad_out = inputs
    first_row, rows_per_batch, key_length, heads, topk = sizes
    query_batch, query_row, query_head, key_batch, key_row, grad_batch, grad_row, grad_head = strides
    k_value, k_tail, pair_value, pair_tail, _gradients = tiles
    key_full, key_empty, pair_full, pair_empty = barriers
    layout: gl.constexpr = gl.SliceLayout(1, COPIES)
    slot = gl.arange(0, 2 * HEADS, layout=layout)
    is_query = slot % 2 == 0
    tiles_of_row = gl.cdiv(topk, BLOCK)
    head_blocks = gl.cdiv(heads, HEADS)
    tile, step = 0, 0
    first_task, last_task = gl.load(task_bounds).to(gl.int32), gl.load(task_bounds + 1).to(gl.int32)
    for number in range(first_task + gl.program_id(0), last_task, gl.num_programs(0)):
        row_in_chunk, first, sharers = tile_of(gl.load(tasks + number), tiles_of_row)
        row = (first_row + row_in_chunk).to(gl.int64)
        batch = row // rows_per_batch
        position = first + gl.arange(0, BLOCK, layout=layout)
        index = gl.load(indices + row_in_chunk * topk + position, mask=position < topk, other=-1)
        valid = (index >= 0) & (index < key_length)
        key_starts = key_value + batch * key_batch + index.to(gl.int64) * key_row
        mbarrier.wait(key_empty, (tile & 1) ^ 1)
        copy_rows(k_value.index(0), key_starts, valid, 0, VALUE)
        copy_rows(k_tail.index(0), key_starts, valid, VALUE, TAIL)
        async_copy.mbarrier_arrive(key_full, increment_count=False)
        tile += 1  # noqa: SIM113  kernels have no enumerate
        first_base = query + batch * query_batch + (row % rows_per_batch) * query_row
        first_grad_base = grad_out + batch * grad_batch + (row % rows_per_batch) * grad_row
        for turn in range(sharers * head_blocks):
            sharer = (turn // head_blocks).to(gl.int64)
            base = first_base + sharer * query_row
            grad_base = first_grad_base + sharer * grad_row
            # Query and output gradient of a head are neighbors: one product gives scores and gradient of the
            # probabilities, in neighboring registers, and one product gives both paths into the key.
            head = (turn % head_blocks * HEADS + slot // 2).to(gl.int64)
            offsets = gl.where(is_query, head * query_head, head * grad_head)
            starts = gl.multiple_of(gl.where(is_query, base, grad_base) + offsets, 16)
            stage = step % STAGES
            mbarrier.wait(pair_empty.index(stage), ((step // STAGES) & 1) ^ 1)
            copy_rows(pair_value.index(stage), starts, head < heads, 0, VALUE)
            # The output has no rotary part, so its gradient gets zeros there.
            copy_rows(pair_tail.index(stage), starts, (head < heads) & is_query, VALUE, TAIL)
            async_copy.mbarrier_arrive(pair_full.index(stage), increment_count=False)
            step += 1


@gluon.jit
def add_sums(grad_keys, offsets, index, key_length, sums, FIRST: gl.constexpr, ATOMIC: gl.constexpr):
    """Store or atomically add a tile's key gradients to memory; rows without a key are skipped."""
    columns: gl.constexpr = sums.shape[1]
    layout: gl.constexpr = _added(columns, True)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    sums = gl.convert_layout(gl.convert_layout(sums, _added(columns, False)), layout)
    index, offsets = gl.convert_layout(index, rows), gl.convert_layout(offsets, rows)
    column = gl.arange(0, columns, layout=gl.SliceLayout(0, layout))
    target = grad_keys + offsets[:, None] + (FIRST + column)[None, :]
    valid = ((index >= 0) & (index < key_length))[:, None]
    if ATOMIC:
        gl.atomic_add(target, sums, mask=valid, sem="relaxed")
    else:
        gl.store(target, sums, mask=valid)


@gluon.jit
def multiply_tiles(
    inputs,
    results,
    sizes,
    scales,
    tiles,
    barriers,
    HEADS: gl.constexpr,
    WITH_SUM: gl.constexpr,
    ATOMIC: gl.constexpr,
):
    """Code of the two multiplying warp groups: compute scores, score gradients and key gradients."""
    indices, places, tasks, task_bounds, lse, delta = inputs
    grad_scores, attention_sum, grad_keys = results
    first_row, rows_per_batch, key_length, heads, topk = sizes
    softmax_scale, scale_log2 = scales
    k_value, k_tail, pair_value, pair_tail, gradients = tiles
    key_full, key_empty, pair_full, pair_empty = barriers
    both_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HEADS, 16])
    none = gl.full([BLOCK, 2 * HEADS], 0.0, gl.float32, layout=both_layout)
    example, _ = gl.split(gl.reshape(none, [BLOCK, HEADS, 2]))
    rows: gl.constexpr = gl.SliceLayout(1, example.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, example.type.layout)
    stored_layout: gl.constexpr = _stored(HEADS)
    stored_rows: gl.constexpr = gl.SliceLayout(1, stored_layout)
    tiles_of_row = gl.cdiv(topk, BLOCK)
    head_blocks = gl.cdiv(heads, HEADS)
    stored_heads = head_blocks * HEADS
    tile, step = 0, 0
    first_task, last_task = gl.load(task_bounds).to(gl.int32), gl.load(task_bounds + 1).to(gl.int32)
    for number in range(first_task + gl.program_id(0), last_task, gl.num_programs(0)):
        first_in_chunk, first, sharers = tile_of(gl.load(tasks + number), tiles_of_row)
        position = first + gl.arange(0, BLOCK, layout=rows)
        index = gl.load(indices + first_in_chunk * topk + position, mask=position < topk, other=-1)
        valid = (index >= 0) & (index < key_length)
        stored_position = first + gl.arange(0, BLOCK, layout=stored_rows)
        value_sums = gl.full([BLOCK, VALUE], 0.0, gl.float32, layout=VALUE_SUMS)
        tail_sums = gl.full([BLOCK, TAIL], 0.0, gl.float32, layout=TAIL_SUMS)
        acc_value, acc_tail = warpgroup_mma_init(value_sums), warpgroup_mma_init(tail_sums)
        summed = gl.full([BLOCK, HEADS], 0.0, gl.float32, layout=example.type.layout)
        mbarrier.wait(key_full, tile & 1)
        tile += 1  # noqa: SIM113  kernels have no enumerate
        turns = sharers * head_blocks
        for turn in range(turns):
            row_in_chunk = first_in_chunk + turn // head_blocks
            row = (first_row + row_in_chunk).to(gl.int64)
            first_head = turn % head_blocks * HEADS
            head = first_head + gl.arange(0, HEADS, layout=columns)
            stage = step % STAGES
            mbarrier.wait(pair_full.index(stage), (step // STAGES) & 1)
            fence_async_shared()
            # After the fence, because the fence waits for the thread's outstanding loads.
            norm = gl.load(lse + row * heads + head, mask=head < heads, other=float("inf"))
            row_delta = gl.load(delta + row * heads + head, mask=head < heads, other=0.0)
            value, tail = pair_value.index(stage), pair_tail.index(stage)
            only = kept_inside(0)
            both = warpgroup_mma(
                k_value.index(only), value.permute((1, 0)), none, use_acc=False, is_async=True
            )
            both = warpgroup_mma(k_tail.index(only), tail.permute((1, 0)), both, is_async=True)
            # The previous turn's two products have ended: the other pair buffer and `gradients` have been
            # read.
            value_sums, tail_sums = warpgroup_mma_wait(2, deps=(acc_value, acc_tail))
            mbarrier.arrive(pair_empty.index((step + 1) % STAGES), pred=turn > 0)
            both = warpgroup_mma_wait(0, deps=(both,))
            if turn + 1 == turns:
                mbarrier.arrive(key_empty)
            # [keys, heads] each
            scores, inner = gl.split(gl.reshape(both, [BLOCK, HEADS, 2]))
            probabilities = power_of_two(scores * scale_log2 - (norm * LOG2E)[None, :])
            probabilities = gl.where(valid[:, None], probabilities, 0.0)
            if WITH_SUM:
                summed += probabilities
            gradient = probabilities * (inner * softmax_scale - (row_delta * softmax_scale)[None, :])
            gradient = gradient.to(k_value.dtype)
            pair = gl.reshape(gl.join(gradient, probabilities.to(k_value.dtype)), [BLOCK, 2 * HEADS])
            gradients.store(gl.convert_layout(pair, both_layout, assert_trivial=True))
            fence_async_shared()
            acc_value = warpgroup_mma(gradients, value, warpgroup_mma_init(value_sums), is_async=True)
            acc_tail = warpgroup_mma(gradients, tail, warpgroup_mma_init(tail_sums), is_async=True)
            # In the register order of the product, so that no data moves: see GROUPS in
            # `backward_query_kernel`.
            stored = gl.permute(gl.reshape(gradient, [BLOCK, 2, HEADS // 8, 4]), (0, 1, 3, 2))
            stored = gl.convert_layout(gl.reshape(stored, [BLOCK, HEADS]), stored_layout, assert_trivial=True)
            place = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(0, stored_layout))
            starts = gl.multiple_of((row_in_chunk * topk + stored_position) * stored_heads, HEADS)
            gl.store(
                grad_scores + starts[:, None] + place[None, :],
                stored,
                mask=(stored_position < topk)[:, None],
            )
            if WITH_SUM:  # noqa: SIM102  for the compiler alone
                if first_head + HEADS >= heads:
                    inside = position < topk
                    entry = gl.load(places + row_in_chunk * topk + position, mask=inside, other=0)
                    gl.store(attention_sum + row * topk + entry, gl.sum(summed, axis=1), mask=inside)
                    summed = gl.full([BLOCK, HEADS], 0.0, gl.float32, layout=example.type.layout)
            step += 1
        value_sums, tail_sums = warpgroup_mma_wait(0, deps=(acc_value, acc_tail))
        mbarrier.arrive(pair_empty.index((step + 1) % STAGES))
        if ATOMIC:
            offsets = (first_row + first_in_chunk) // rows_per_batch * key_length + index
        else:
            offsets = first_in_chunk * topk + position
        offsets = offsets.to(gl.int64) * (VALUE + TAIL)
        add_sums(grad_keys, offsets, index, key_length, value_sums, 0, ATOMIC)
        add_sums(grad_keys, offsets, index, key_length, tail_sums, VALUE, ATOMIC)


@gluon.jit
def hopper_backward_keys_kernel(
    query,
    key_value,
    indices,
    places,
    tasks,
    task_bounds,
    grad_out,
    lse,
    delta,
    grad_scores,
    attention_sum,
    grad_keys,
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
    ATOMIC: gl.constexpr,
):
    """Process a chunk of rows from ``first_row`` on, with as many programs as run at once.

    ``indices`` and ``places`` are the fields of ``SharedTiles`` for the chunk. ``tasks`` comes from
    ``tasks_of``; the chunk's tasks are between the two ``task_bounds``. ``grad_scores`` is ``[rows of the
    chunk, topk, heads]`` in the order of ``indices``. Its heads are padded to a multiple of HEADS, in the
    order that ``backward_query_kernel`` calls GROUPS. ``grad_keys`` is as in ``backward_keys_kernel``;
    without ATOMIC, entries whose gradient is part of an earlier row's sum are not written.
    """
    dtype: gl.constexpr = query.dtype.element_ty
    narrow: gl.constexpr = gl.NVMMASharedLayout(4 * HEADS, 16, 2)
    k_value = gl.allocate_shared_memory(dtype, [1, BLOCK, VALUE], TILE)
    k_tail = gl.allocate_shared_memory(dtype, [1, BLOCK, TAIL], TILE)
    pair_value = gl.allocate_shared_memory(dtype, [STAGES, 2 * HEADS, VALUE], TILE)
    pair_tail = gl.allocate_shared_memory(dtype, [STAGES, 2 * HEADS, TAIL], TILE)
    gradients = gl.allocate_shared_memory(dtype, [BLOCK, 2 * HEADS], narrow)
    tiles = (k_value, k_tail, pair_value, pair_tail, gradients)
    # Keys copied, keys read, pairs copied, pairs read.
    barriers = (barrier_of(COPYING), barrier_of(1), barriers_of(STAGES, COPYING), barriers_of(STAGES, 1))
    sizes = (first_row, rows_per_batch, key_length, heads, topk)
    strides = (query_batch, query_row, query_head, key_batch, key_row, grad_batch, grad_row, grad_head)
    read = (query, key_value, indices, tasks, task_bounds, grad_out)
    inputs = (indices, places, tasks, task_bounds, lse, delta)
    results = (grad_scores, attention_sum, grad_keys)
    scales = (softmax_scale, scale_log2)
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (inputs, results, sizes, scales, tiles, barriers, HEADS, WITH_SUM, ATOMIC),
            ),
            (copy_tiles, (read, sizes, strides, tiles, barriers, HEADS)),
        ],
        [4],
        [40],
    )
