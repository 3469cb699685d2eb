"""Triton kernels of the Lightning Indexer.

Shapes beside the code: N block of keys, J block of indexer heads, Q block of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mindspeed_dsa.ops.triton_common import add_rows, is_key, load_rows, product, store_rows


@triton.jit
def head_scores(
    keys,
    query_row_base,
    weight_row_base,
    query_head,
    weight_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_RELU: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Scores of one row with a tile of keys, ``[N]`` fp32; heads are summed in order."""
    scores = tl.zeros([BLOCK_N], tl.float32)
    for first_head in range(0, HEADS, BLOCK_J):
        head = first_head + tl.arange(0, BLOCK_J)
        is_head = head < HEADS
        q = load_rows(query_row_base, head.to(tl.int64) * query_head, is_head, 0, DIM, BLOCK_D)
        w = tl.load(weight_row_base + head.to(tl.int64) * weight_head, mask=is_head, other=0.0)
        # [N, J]
        products = product(keys, tl.trans(q), tl.zeros([BLOCK_N, BLOCK_J], tl.float32), WIDEN)
        if USE_RELU:
            products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        scores += tl.sum(products * w.to(tl.float32)[None, :], axis=1)
    return scores


@triton.jit
def score_slab_kernel(
    query,
    key,
    weights,
    starts,
    ends,
    slab,
    rows,
    key_length,
    query_row,
    query_head,
    key_row,
    weight_row,
    weight_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    USE_RELU: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program per block of rows and tile of keys: the keys stay, the rows' heads stream by.

    ``slab`` is ``[rows, key_length]``. Tiles that no row of the block sees are skipped, not written.
    """
    tiles = tl.cdiv(key_length, BLOCK_N)
    first_key = (tl.program_id(0) % tiles) * BLOCK_N
    first_row = (tl.program_id(0) // tiles) * BLOCK_Q
    row = first_row + tl.arange(0, BLOCK_Q)
    low = tl.load(starts + row, mask=row < rows, other=0)
    high = tl.load(ends + row, mask=row < rows, other=0)
    low = tl.min(tl.where(low < high, low, key_length), axis=0)
    high = tl.max(tl.where(low < high, high, 0), axis=0)
    if (first_key < high) & (first_key + BLOCK_N > low):
        position = first_key + tl.arange(0, BLOCK_N)
        inside = position < key_length
        keys = load_rows(key, position.to(tl.int64) * key_row, inside, 0, DIM, BLOCK_D)
        for index in range(first_row, tl.minimum(first_row + BLOCK_Q, rows)):
            at = tl.cast(index, tl.int64)
            scores = head_scores(
                keys,
                query + at * query_row,
                weights + at * weight_row,
                query_head,
                weight_head,
                HEADS,
                DIM,
                BLOCK_J,
                BLOCK_D,
                BLOCK_N,
                USE_RELU,
                WIDEN,
            )
            tl.store(slab + at * key_length + position, scores, mask=inside)


@triton.jit
def ordered_bits(scores):
    """Unsigned integers in the order of the scores; -0.0 and 0.0 give the same one, NaN the least."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    # Flip the sign bit of positive numbers and all bits of negative ones.
    flipped = bits ^ ((bits >> 31) | -2147483648)
    return tl.where(scores == scores, flipped, 0).to(tl.uint32, bitcast=True)


@triton.jit
def next_digit(
    scores_of_row,
    start,
    end,
    key_length,
    prefix,
    wanted,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The next ``WIDTH`` bits of the last score to be taken, ``SHIFT`` from the lowest: one pass over a row.

    Takes and returns the bits known before, and how many scores that begin with them are still to be taken.
    """
    lane = tl.arange(0, BLOCK)
    digit = tl.arange(0, 1 << WIDTH)
    counts = tl.zeros([1 << WIDTH], tl.int32)
    for first in range(start // BLOCK * BLOCK, end, BLOCK):
        position = first + lane
        scores = tl.load(scores_of_row + position, mask=position < key_length, other=0.0)
        counted = (position >= start) & (position < end)
        bits = ordered_bits(scores)
        if SHIFT + WIDTH < 32:
            counted = counted & ((bits >> (SHIFT + WIDTH)) == prefix)
        digits = ((bits >> SHIFT) & ((1 << WIDTH) - 1)).to(tl.int32)
        counts += tl.histogram(tl.where(counted, digits, 0), 1 << WIDTH)
        # What is not counted was put to digit 0.
        counts -= tl.where(digit == 0, BLOCK - tl.sum(counted.to(tl.int32), axis=0), 0)
    # Scores with at least this digit, for each digit: falls from all to few.
    at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    chosen = tl.sum((at_least >= wanted).to(tl.int32), axis=0) - 1
    wanted -= tl.sum(tl.where(digit > chosen, counts, 0), axis=0)
    return (prefix << WIDTH) | chosen.to(tl.uint32), wanted


@triton.jit
def select_kernel(
    slab,
    starts,
    ends,
    topk_indices,
    topk_scores,
    key_length,
    topk,
    BLOCK: tl.constexpr,
):
    """One program per row: the topk highest scores of its range, ascending positions, -1 at the tail.

    Three passes over the row find the bits of the topk-th highest score, eleven, eleven and ten, by counting;
    a fourth copies what is above it and the first of those equal to it. Counts do not depend on the order in
    which threads count, so the result depends on the scores alone.
    """
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + row)
    end = tl.load(ends + row)
    scores_of_row = slab + row * key_length
    lane = tl.arange(0, BLOCK)
    # Blocks begin at their multiples and are read up to the last key, seen or not: four scores at a time.
    begin = start // BLOCK * BLOCK
    # Bits known so far, and how many scores that begin with them are still to be taken.
    prefix = tl.zeros([], tl.uint32)
    wanted = tl.zeros([], tl.int32) + topk
    if end - start > topk:
        prefix, wanted = next_digit(scores_of_row, start, end, key_length, prefix, wanted, 21, 11, BLOCK)
        prefix, wanted = next_digit(scores_of_row, start, end, key_length, prefix, wanted, 10, 11, BLOCK)
        prefix, wanted = next_digit(scores_of_row, start, end, key_length, prefix, wanted, 0, 10, BLOCK)
    taken = tl.zeros([], tl.int32)
    ties = tl.zeros([], tl.int32)
    for first in range(begin, end, BLOCK):
        position = first + lane
        scores = tl.load(scores_of_row + position, mask=position < key_length, other=0.0)
        inside = (position >= start) & (position < end)
        bits = ordered_bits(scores)
        above = inside & (bits > prefix)
        equal = inside & (bits == prefix)
        # Both counts in one scan: a block has fewer than 2^15 scores.
        both = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
        equal_before = ties + (both >> 16)
        kept = above | (equal & (equal_before <= wanted))
        slot = taken + (both & 65535) + tl.minimum(equal_before, wanted) - tl.minimum(ties, wanted) - 1
        tl.store(topk_indices + row * topk + slot, position, mask=kept)
        tl.store(topk_scores + row * topk + slot, scores, mask=kept)
        taken += tl.sum(kept.to(tl.int32), axis=0)
        ties += tl.sum(equal.to(tl.int32), axis=0)
    for first in range(0, topk, BLOCK):
        slot = first + lane
        empty = (slot >= taken) & (slot < topk)
        tl.store(topk_indices + row * topk + slot, -1, mask=empty)
        tl.store(topk_scores + row * topk + slot, float("-inf"), mask=empty)


@triton.jit
def scores_at_kernel(
    query,
    key,
    weights,
    indices,
    lengths,
    scores,
    rows_per_batch,
    key_length,
    topk,
    query_batch,
    query_row,
    query_head,
    key_batch,
    key_row,
    weight_batch,
    weight_row,
    weight_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_RELU: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program per row and tile of selected keys; -inf where there is no key."""
    tiles = tl.cdiv(topk, BLOCK_N)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * BLOCK_N
    position = first + tl.arange(0, BLOCK_N)
    result = tl.full([BLOCK_N], float("-inf"), tl.float32)
    if first < tl.load(lengths + row):
        batch = row // rows_per_batch
        in_batch = row % rows_per_batch
        index = tl.load(indices + row * topk + position, mask=position < topk, other=-1)
        valid = is_key(index, key_length)
        keys = load_rows(key + batch * key_batch, index.to(tl.int64) * key_row, valid, 0, DIM, BLOCK_D)
        found = head_scores(
            keys,
            query + batch * query_batch + in_batch * query_row,
            weights + batch * weight_batch + in_batch * weight_row,
            query_head,
            weight_head,
            HEADS,
            DIM,
            BLOCK_J,
            BLOCK_D,
            BLOCK_N,
            USE_RELU,
            WIDEN,
        )
        result = tl.where(valid, found, float("-inf"))
    tl.store(scores + row * topk + position, result, mask=position < topk)


@triton.jit
def score_gradients_kernel(
    grad_scores,
    query,
    key,
    weights,
    indices,
    begins,
    ends,
    grad_query,
    grad_key,
    grad_weights,
    first_row,
    rows_per_batch,
    key_length,
    width,
    query_batch,
    query_row,
    query_head,
    key_batch,
    key_row,
    weight_batch,
    weight_row,
    weight_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_RELU: tl.constexpr,
    GATHERED: tl.constexpr,
    KEY_GRADIENT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program per row: its query and weights get their gradient, and each of its keys a share.

    With ``GATHERED`` the entries ``0 .. ends[row]`` of ``indices`` say which keys, else they are the keys
    ``begins[row] .. ends[row]``. ``grad_scores`` is ``[rows of the chunk, width]``. ``KEY_GRADIENT`` is
    "none", "atomic" (``[batch * key_length, dim]``) or "tiles" (``[rows of the chunk, width, dim]``).
    """
    row_in_chunk = tl.program_id(0).to(tl.int64)
    row = first_row + row_in_chunk
    batch = row // rows_per_batch
    in_batch = row % rows_per_batch
    keys_base = key + batch * key_batch
    head = tl.arange(0, BLOCK_J)
    is_head = head < HEADS
    q = load_rows(
        query + batch * query_batch + in_batch * query_row,
        head.to(tl.int64) * query_head,
        is_head,
        0,
        DIM,
        BLOCK_D,
    )
    weights_base = weights + batch * weight_batch + in_batch * weight_row
    w = tl.load(weights_base + head.to(tl.int64) * weight_head, mask=is_head, other=0.0).to(tl.float32)
    acc_query = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    # Summed over keys once, at the end.
    acc_weights = tl.zeros([BLOCK_N, BLOCK_J], tl.float32)
    begin = 0
    end = tl.load(ends + row)
    if not GATHERED:
        begin = tl.load(begins + row)
    for first in range(begin, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        inside = position < end
        index = position
        if GATHERED:
            index = tl.load(indices + row * width + tl.minimum(position, end - 1))
            inside = inside & is_key(index, key_length)
        gradient = tl.load(grad_scores + row_in_chunk * width + position, mask=inside, other=0.0)
        keys = load_rows(keys_base, index.to(tl.int64) * key_row, inside, 0, DIM, BLOCK_D)
        # [N, J]
        products = product(keys, tl.trans(q), tl.zeros([BLOCK_N, BLOCK_J], tl.float32), WIDEN)
        grad_products = gradient.to(tl.float32)[:, None] * w[None, :]
        if USE_RELU:
            # The derivative at zero is zero.
            grad_products = tl.where(products > 0, grad_products, 0.0)
            products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        acc_weights += products * gradient.to(tl.float32)[:, None]
        grad_products = grad_products.to(keys.dtype)
        acc_query = product(tl.trans(grad_products), keys, acc_query, WIDEN)
        if KEY_GRADIENT != "none":
            share = product(grad_products, q, tl.zeros([BLOCK_N, BLOCK_D], tl.float32), WIDEN)
            if KEY_GRADIENT == "atomic":
                add_rows(grad_key, (batch * key_length + index) * DIM, inside, share, 0, DIM, BLOCK_D)
            else:
                entry = (row_in_chunk * width + position) * DIM
                store_rows(grad_key, entry, inside, share, 0, DIM, BLOCK_D)
    store_rows(grad_query, (row * HEADS + head) * DIM, is_head, acc_query, 0, DIM, BLOCK_D)
    total = tl.sum(acc_weights, axis=0)
    tl.store(grad_weights + row * HEADS + head, total.to(grad_weights.dtype.element_ty), mask=is_head)
