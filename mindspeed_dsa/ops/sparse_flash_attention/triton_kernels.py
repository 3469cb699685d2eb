"""Triton kernels of sparse flash attention and of the indexer loss's target.

Letters in shape comments: H block of heads, N block of selected keys, V value part and T rest of a key.
Scores are in units of log 2, because the hardware has exp2 only. `row` counts query rows over all sequences.
Offsets are 64-bit: rows x heads x 576 exceeds 2^31 at 32k rows and 128 heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mindspeed_dsa.ops.triton.common import LOG2E as LOG2E_VALUE
from mindspeed_dsa.ops.triton.common import (
    TAKES_BRANCHES,
    add_rows,
    is_key,
    load_rows,
    load_rows_at,
    product,
    store_rows,
)

LOG2E: tl.constexpr = tl.constexpr(LOG2E_VALUE)


@triton.jit
def add_scaled(scores, rest, scale_log2, TAIL_DIM: tl.constexpr):
    """Return ``(scores + rest) * scale``, scaled before the addition.

    Without the scaling in between, the compiler would fuse the addition into the second product, and then
    treat the two as a chain of products.
    """
    scores = scores * scale_log2
    if TAIL_DIM > 0:
        scores += rest * scale_log2
    return scores


@triton.jit
def unchained(scores, rest, scale_log2, heads, TAIL_DIM: tl.constexpr):
    """Call :func:`add_scaled` in a branch that is always taken; the compiler does not know that.

    If a product feeds another product, the compiler gives all columns of the first product to every warp
    group. With 64 rows, both groups of a program would then do the same work twice. A branch hides the
    dependency from the compiler. Older compilers fail on a branch here, so they get the plain sum and do the
    work twice.
    """
    if TAKES_BRANCHES:
        if heads > 0:
            scores = add_scaled(scores, rest, scale_log2, TAIL_DIM)
    else:
        scores = add_scaled(scores, rest, scale_log2, TAIL_DIM)
    return scores


@triton.jit
def forward_kernel(
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
    VALUE_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WITH_OUT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute online softmax and output of a row over its keys; one program per row and block of heads."""
    head_blocks = tl.cdiv(heads, BLOCK_H)
    row = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = (tl.program_id(0) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    batch = row // rows_per_batch
    is_head = head < heads
    base = query + batch * query_batch + (row % rows_per_batch) * query_row
    keys = key_value + batch * key_batch
    q_offsets = head.to(tl.int64) * query_head  # [H]
    q_value = load_rows(base, q_offsets, is_head, 0, VALUE_DIM, BLOCK_V)  # [H, V]
    if TAIL_DIM > 0:
        q_tail = load_rows(base, q_offsets, is_head, VALUE_DIM, TAIL_DIM, BLOCK_T)  # [H, T]

    # A finite start: a tile without a valid key must not compute inf - inf.
    highest = tl.full([BLOCK_H], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    length = tl.load(lengths + row)
    for first in range(0, length, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        # Positions past the end read the last entry again and are masked, which keeps the load unmasked.
        index = tl.load(indices + row * topk + tl.minimum(position, length - 1))
        valid = (position < length) & is_key(index, key_length)
        k_offsets = index.to(tl.int64) * key_row
        k_value = load_rows(keys, k_offsets, valid, 0, VALUE_DIM, BLOCK_V)  # [N, V]
        scores = product(q_value, tl.trans(k_value), tl.zeros([BLOCK_H, BLOCK_N], tl.float32), WIDEN)
        rest = scores
        if TAIL_DIM > 0:
            k_tail = load_rows(keys, k_offsets, valid, VALUE_DIM, TAIL_DIM, BLOCK_T)  # [N, T]
            rest = product(q_tail, tl.trans(k_tail), tl.zeros([BLOCK_H, BLOCK_N], tl.float32), WIDEN)
        scores = unchained(scores, rest, scale_log2, heads, TAIL_DIM)
        scores = tl.where(valid[None, :], scores, float("-inf"))  # [H, N]
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        probabilities = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(probabilities, axis=1)
        highest = higher
        if WITH_OUT:
            acc = acc * shrink[:, None]
            acc = product(probabilities.to(k_value.dtype), k_value, acc, WIDEN)

    empty = total == 0
    natural = (highest + tl.log2(tl.where(empty, 1.0, total))) / LOG2E  # [H]
    tl.store(lse + row * heads + head, tl.where(empty, float("-inf"), natural), mask=is_head)
    if WITH_OUT:
        acc = acc / tl.where(empty, 1.0, total)[:, None]
        store_rows(out, (row * heads + head) * VALUE_DIM, is_head, acc, 0, VALUE_DIM, BLOCK_V)


@triton.jit
def attention_sum_kernel(
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
    VALUE_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Sum exp(score - lse) over heads, in order; one program per row and tile of keys."""
    tiles = tl.cdiv(topk, BLOCK_N)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * BLOCK_N
    position = first + tl.arange(0, BLOCK_N)
    summed = tl.zeros([BLOCK_N], tl.float32)
    if first < tl.load(lengths + row):
        batch = row // rows_per_batch
        base = query + batch * query_batch + (row % rows_per_batch) * query_row
        keys = key_value + batch * key_batch
        index = tl.load(indices + row * topk + position, mask=position < topk, other=-1)
        valid = is_key(index, key_length)
        k_offsets = index.to(tl.int64) * key_row
        k_value = load_rows(keys, k_offsets, valid, 0, VALUE_DIM, BLOCK_V)  # [N, V]
        if TAIL_DIM > 0:
            k_tail = load_rows(keys, k_offsets, valid, VALUE_DIM, TAIL_DIM, BLOCK_T)  # [N, T]
        for first_head in range(0, heads, BLOCK_H):
            head = first_head + tl.arange(0, BLOCK_H)
            is_head = head < heads
            q_offsets = head.to(tl.int64) * query_head
            q_value = load_rows(base, q_offsets, is_head, 0, VALUE_DIM, BLOCK_V)  # [H, V]
            # [N, H]
            scores = product(k_value, tl.trans(q_value), tl.zeros([BLOCK_N, BLOCK_H], tl.float32), WIDEN)
            if TAIL_DIM > 0:
                q_tail = load_rows(base, q_offsets, is_head, VALUE_DIM, TAIL_DIM, BLOCK_T)
                scores = product(k_tail, tl.trans(q_tail), scores, WIDEN)
            # lse = inf for absent heads makes their exp2 zero.
            norm = tl.load(lse + row * heads + head, mask=is_head, other=float("inf")) * LOG2E
            summed += tl.sum(tl.exp2(scores * scale_log2 - norm[None, :]), axis=1)
        summed = tl.where(valid, summed, 0.0)
    tl.store(attention_sum + row * topk + position, summed, mask=position < topk)


@triton.jit
def delta_kernel(
    grad_out,
    out,
    delta,
    rows_per_batch,
    heads,
    grad_batch,
    grad_row,
    grad_head,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write delta, the dot product of output and output gradient; one program per row and block of heads."""
    head_blocks = tl.cdiv(heads, BLOCK_H)
    row = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = (tl.program_id(0) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < heads
    base = grad_out + (row // rows_per_batch) * grad_batch + (row % rows_per_batch) * grad_row
    # [H, V] each
    gradient = load_rows(base, head.to(tl.int64) * grad_head, is_head, 0, VALUE_DIM, BLOCK_V)
    value = load_rows(out, (row * heads + head) * VALUE_DIM, is_head, 0, VALUE_DIM, BLOCK_V)
    inner = tl.sum(gradient.to(tl.float32) * value.to(tl.float32), axis=1)
    tl.store(delta + row * heads + head, inner, mask=is_head)


@triton.jit
def backward_keys_kernel(
    query,
    key_value,
    indices,
    lengths,
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
    VALUE_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WITH_SUM: tl.constexpr,
    ATOMIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute gradients of scores and keys over all heads; one program per row and tile of keys.

    A key's gradient is therefore written once per row. ``grad_scores`` receives the gradient of the scores,
    ``[rows of the chunk, topk, heads]``. With ATOMIC, ``grad_keys`` is ``[batch * key_length, dim]`` and
    added to with atomics. Without, it receives one row per entry of the chunk,
    ``[rows of the chunk, topk, dim]``.
    """
    tiles = tl.cdiv(topk, BLOCK_N)
    row_in_chunk = (tl.program_id(0) // tiles).to(tl.int64)
    row = first_row + row_in_chunk
    first = (tl.program_id(0) % tiles) * BLOCK_N
    if first < tl.load(lengths + row):
        batch = row // rows_per_batch
        base = query + batch * query_batch + (row % rows_per_batch) * query_row
        grad_base = grad_out + batch * grad_batch + (row % rows_per_batch) * grad_row
        keys = key_value + batch * key_batch
        position = first + tl.arange(0, BLOCK_N)
        index = tl.load(indices + row * topk + position, mask=position < topk, other=-1)
        valid = is_key(index, key_length)
        k_offsets = index.to(tl.int64) * key_row
        k_value = load_rows(keys, k_offsets, valid, 0, VALUE_DIM, BLOCK_V)  # [N, V]
        acc_value = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
        if TAIL_DIM > 0:
            k_tail = load_rows(keys, k_offsets, valid, VALUE_DIM, TAIL_DIM, BLOCK_T)  # [N, T]
            acc_tail = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        summed = tl.zeros([BLOCK_N], tl.float32)
        entry = row_in_chunk * topk + position
        slot = tl.arange(0, 2 * BLOCK_H)
        is_query = slot % 2 == 0
        # If the loop might not run, the accumulators would be defined outside of the tensor cores. The
        # assembler then lets no two products overlap.
        tl.assume(heads > 0)
        for first_head in range(0, heads, BLOCK_H):
            head = first_head + tl.arange(0, BLOCK_H)
            is_head = head < heads
            norm = tl.load(lse + row * heads + head, mask=is_head, other=float("inf")) * LOG2E
            row_delta = tl.load(delta + row * heads + head, mask=is_head, other=0.0)
            # Query and output gradient of a head are neighbors in one tile. One product gives scores and
            # gradient of the probabilities, in neighboring registers; one product gives both paths into the
            # key.
            slot_head = (first_head + slot // 2).to(tl.int64)
            is_slot = slot_head < heads
            offsets = tl.where(is_query, slot_head * query_head, slot_head * grad_head)
            starts = tl.where(is_query, base, grad_base) + offsets
            if ALIGNED:
                # The compiler cannot prove alignment through the selection between two pointers.
                starts = tl.multiple_of(starts, 16)
            pair_value = load_rows_at(starts, is_slot, 0, VALUE_DIM, BLOCK_V)  # [2H, V]
            # [N, 2H]
            both = product(k_value, tl.trans(pair_value), tl.zeros([BLOCK_N, 2 * BLOCK_H], tl.float32), WIDEN)
            rest = both
            if TAIL_DIM > 0:
                # The output has no rotary part, so its gradient gets zeros there.
                pair_tail = load_rows_at(starts, is_slot & is_query, VALUE_DIM, TAIL_DIM, BLOCK_T)  # [2H, T]
                rest = product(
                    k_tail, tl.trans(pair_tail), tl.zeros([BLOCK_N, 2 * BLOCK_H], tl.float32), WIDEN
                )
            both = unchained(both, rest, scale_log2, heads, TAIL_DIM)
            # [N, H] each, both scaled to units of log 2
            scores, inner = tl.split(tl.reshape(both, [BLOCK_N, BLOCK_H, 2]))
            probabilities = tl.exp2(scores - norm[None, :])
            probabilities = tl.where(valid[:, None], probabilities, 0.0)
            if WITH_SUM:
                summed += tl.sum(probabilities, axis=1)
            grad_tile = probabilities * (inner / LOG2E - row_delta[None, :] * softmax_scale)
            grad_tile = grad_tile.to(k_value.dtype)
            tl.store(
                grad_scores + entry[:, None] * heads + head[None, :],
                grad_tile,
                mask=(position < topk)[:, None] & is_head[None, :],
            )
            pair = tl.join(grad_tile, probabilities.to(k_value.dtype))  # [N, H, 2]
            pair = tl.reshape(pair, [BLOCK_N, 2 * BLOCK_H])  # [N, 2H]
            acc_value = product(pair, pair_value, acc_value, WIDEN)
            if TAIL_DIM > 0:
                acc_tail = product(pair, pair_tail, acc_tail, WIDEN)
        if WITH_SUM:
            tl.store(attention_sum + row * topk + position, summed, mask=position < topk)
        dim: tl.constexpr = VALUE_DIM + TAIL_DIM
        if ATOMIC:
            offsets = (batch * key_length + index) * dim
            add_rows(grad_keys, offsets, valid, acc_value, 0, VALUE_DIM, BLOCK_V)
            if TAIL_DIM > 0:
                add_rows(grad_keys, offsets, valid, acc_tail, VALUE_DIM, TAIL_DIM, BLOCK_T)
        else:
            store_rows(grad_keys, entry * dim, valid, acc_value, 0, VALUE_DIM, BLOCK_V)
            if TAIL_DIM > 0:
                store_rows(grad_keys, entry * dim, valid, acc_tail, VALUE_DIM, TAIL_DIM, BLOCK_T)


@triton.jit
def backward_query_kernel(
    key_value,
    indices,
    lengths,
    grad_scores,
    grad_query,
    first_row,
    rows_per_batch,
    key_length,
    heads,
    stored_heads,
    topk,
    key_batch,
    key_row,
    VALUE_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute the gradients of queries: multiply the gradients of their scores with the keys.

    One program per row, block of heads and part of the columns. ``indices`` are the entries of the chunk's
    rows, in the order of ``grad_scores``. With GROUPS > 1, the heads of ``grad_scores`` are in the register
    order of warp group products: four threads, each with every fourth of GROUPS x 4 heads.
    """
    programs = tl.cdiv(stored_heads, BLOCK_H) * PARTS
    row_in_chunk = (tl.program_id(0) // programs).to(tl.int64)
    row = first_row + row_in_chunk
    part = tl.program_id(0) % PARTS
    place = (tl.program_id(0) % programs) // PARTS * BLOCK_H + tl.arange(0, BLOCK_H)
    is_place = place < stored_heads
    if GROUPS > 1:
        # Stored place -> head: the four threads of a group of heads hold heads 0, 4, 8, ..., then 1, 5, 9,
        # ...
        head = place // (4 * GROUPS) * (4 * GROUPS) + place % GROUPS * 4 + place // GROUPS % 4
    else:
        head = place
    is_head = head < heads
    value_dim: tl.constexpr = VALUE_DIM // PARTS
    block_v: tl.constexpr = BLOCK_V // PARTS
    tail_dim: tl.constexpr = TAIL_DIM // PARTS
    block_t: tl.constexpr = BLOCK_T // PARTS
    keys = key_value + (row // rows_per_batch) * key_batch + part * value_dim
    tail_keys = key_value + (row // rows_per_batch) * key_batch + part * tail_dim
    acc_value = tl.zeros([BLOCK_H, block_v], tl.float32)
    if TAIL_DIM > 0:
        acc_tail = tl.zeros([BLOCK_H, block_t], tl.float32)
    length = tl.load(lengths + row)
    for first in range(0, length, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        inside = position < length
        index = tl.load(indices + row_in_chunk * topk + tl.minimum(position, length - 1))
        valid = inside & is_key(index, key_length)
        k_offsets = index.to(tl.int64) * key_row
        # [N, H]; beyond the length nothing was written
        grad_tile = tl.load(
            grad_scores + (row_in_chunk * topk + position)[:, None] * stored_heads + place[None, :],
            mask=inside[:, None] & is_place[None, :],
            other=0.0,
        )
        transposed = tl.trans(grad_tile)  # [H, N]
        k_value = load_rows(keys, k_offsets, valid, 0, value_dim, block_v)  # [N, V / PARTS]
        acc_value = product(transposed, k_value, acc_value, WIDEN)
        if TAIL_DIM > 0:
            k_tail = load_rows(tail_keys, k_offsets, valid, VALUE_DIM, tail_dim, block_t)  # [N, T / PARTS]
            acc_tail = product(transposed, k_tail, acc_tail, WIDEN)
    dim: tl.constexpr = VALUE_DIM + TAIL_DIM
    offsets = (row * heads + head) * dim
    store_rows(grad_query + part * value_dim, offsets, is_head, acc_value, 0, value_dim, block_v)
    if TAIL_DIM > 0:
        store_rows(grad_query + part * tail_dim, offsets, is_head, acc_tail, VALUE_DIM, tail_dim, block_t)
