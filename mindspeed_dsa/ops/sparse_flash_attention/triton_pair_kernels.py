"""Triton kernel of the queries' gradient for two rows at a time, which share tiles of keys.

Beside it in ``triton_kernels.py`` is the one for a row alone. Rows next to each other have entries in common,
which :mod:`shared_tiles` puts first, at the same places in both: their keys are gathered once.

Shapes beside the code: N block of keys, H block of heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mindspeed_dsa.ops.triton.common import is_key, load_rows, product, store_rows


@triton.jit
def load_tile(
    key_value,
    indices,
    first,
    length,
    key_length,
    key_row,
    part,
    VALUE_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gather a part of the columns of a tile's keys: values and tails, ``[N, ...]``, zero where none is."""
    position = first + tl.arange(0, BLOCK_N)
    index = tl.load(indices + tl.minimum(position, length - 1))
    valid = (position < length) & is_key(index, key_length)
    offsets = index.to(tl.int64) * key_row
    value_dim: tl.constexpr = VALUE_DIM // PARTS
    tail_dim: tl.constexpr = TAIL_DIM // PARTS
    values = load_rows(key_value + part * value_dim, offsets, valid, 0, value_dim, value_dim)
    tails = load_rows(key_value + part * tail_dim, offsets, valid, VALUE_DIM, tail_dim, tail_dim)
    return values, tails


@triton.jit
def add_products(
    acc_value, acc_tail, values, tails, grad_scores, first, length, stored_heads, place, WIDEN: tl.constexpr
):
    """Add a tile's gradients of scores times its keys; ``grad_scores`` are those of the row."""
    position = first + tl.arange(0, values.shape[0])
    # [N, H]; beyond the length nothing was written
    gradients = tl.load(
        grad_scores + position[:, None] * stored_heads + place[None, :],
        mask=(position < length)[:, None] & (place < stored_heads)[None, :],
        other=0.0,
    )
    gradients = tl.trans(gradients)
    return product(gradients, values, acc_value, WIDEN), product(gradients, tails, acc_tail, WIDEN)


@triton.jit(do_not_specialize=["rows_of_chunk"])
def backward_query_pairs_kernel(
    key_value,
    indices,
    ends,
    lengths,
    grad_scores,
    grad_query,
    first_row,
    rows_of_chunk,
    rows_per_batch,
    key_length,
    heads,
    stored_heads,
    topk,
    key_batch,
    key_row,
    VALUE_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program per two rows, all their heads, and part of the columns: ``backward_query_kernel`` of both.

    ``indices`` and ``ends`` are those of ``SharedTiles`` for the chunk's rows, and ``grad_scores`` are in
    their order. GROUPS is as there. Both dimensions of keys over PARTS are powers of two.
    """
    row_in_chunk = (tl.program_id(0) // PARTS * 2).to(tl.int64)
    part = tl.program_id(0) % PARTS
    place = tl.arange(0, BLOCK_H)
    head = place // (4 * GROUPS) * (4 * GROUPS) + place % GROUPS * 4 + place // GROUPS % 4
    value_dim: tl.constexpr = VALUE_DIM // PARTS
    tail_dim: tl.constexpr = TAIL_DIM // PARTS
    dim: tl.constexpr = VALUE_DIM + TAIL_DIM
    row = first_row + row_in_chunk
    has_second = row_in_chunk + 1 < rows_of_chunk
    length = tl.load(lengths + row)
    second_length = tl.load(lengths + tl.where(has_second, row + 1, row))
    second_length = tl.where(has_second, second_length, 0)
    shared = tl.load(ends + row_in_chunk * 2 + 1)
    keys = key_value + row // rows_per_batch * key_batch
    second_keys = key_value + (row + 1) // rows_per_batch * key_batch
    indices += row_in_chunk * topk
    second_indices = indices + topk
    grad_scores += row_in_chunk * topk * stored_heads
    second_scores = grad_scores + tl.cast(topk, tl.int64) * stored_heads
    acc_value = tl.zeros([BLOCK_H, value_dim], tl.float32)
    acc_tail = tl.zeros([BLOCK_H, tail_dim], tl.float32)
    second_value = tl.zeros([BLOCK_H, value_dim], tl.float32)
    second_tail = tl.zeros([BLOCK_H, tail_dim], tl.float32)
    for first in range(0, shared, BLOCK_N):
        values, tails = load_tile(
            keys, indices, first, shared, key_length, key_row, part, VALUE_DIM, TAIL_DIM, PARTS, BLOCK_N
        )
        acc_value, acc_tail = add_products(
            acc_value, acc_tail, values, tails, grad_scores, first, shared, stored_heads, place, WIDEN
        )
        second_value, second_tail = add_products(
            second_value, second_tail, values, tails, second_scores, first, shared, stored_heads, place, WIDEN
        )
    for first in range(shared, length, BLOCK_N):
        values, tails = load_tile(
            keys, indices, first, length, key_length, key_row, part, VALUE_DIM, TAIL_DIM, PARTS, BLOCK_N
        )
        acc_value, acc_tail = add_products(
            acc_value, acc_tail, values, tails, grad_scores, first, length, stored_heads, place, WIDEN
        )
    offsets = (row * heads + head) * dim
    is_head = head < heads
    store_rows(grad_query + part * value_dim, offsets, is_head, acc_value, 0, value_dim, value_dim)
    store_rows(grad_query + part * tail_dim, offsets, is_head, acc_tail, VALUE_DIM, tail_dim, tail_dim)
    for first in range(shared, second_length, BLOCK_N):
        values, tails = load_tile(
            *(second_keys, second_indices, first, second_length, key_length, key_row, part),
            *(VALUE_DIM, TAIL_DIM, PARTS, BLOCK_N),
        )
        second_value, second_tail = add_products(
            *(second_value, second_tail, values, tails, second_scores, first, second_length),
            *(stored_heads, place, WIDEN),
        )
    offsets += heads * dim
    is_head = head < tl.where(has_second, heads, 0)
    store_rows(grad_query + part * value_dim, offsets, is_head, second_value, 0, value_dim, value_dim)
    store_rows(grad_query + part * tail_dim, offsets, is_head, second_tail, VALUE_DIM, tail_dim, tail_dim)
