"""Triton kernels of the indexer loss: divergence of rows, and the dense form's target and key gradient.

Letters in shape comments: M block of rows, N block of keys, J all indexer heads, D indexer head size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mindspeed_dsa.ops.triton.common import LOG2E as LOG2E_VALUE
from mindspeed_dsa.ops.triton.common import load_rows, product, store_rows

LOG2E: tl.constexpr = tl.constexpr(LOG2E_VALUE)


@triton.jit
def divergence_kernel(
    scores,
    attention_sum,
    valid,
    begins,
    ends,
    row_weights,
    losses,
    gradient,
    width,
    RANGES: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a row's weighted divergence and its gradient with respect to the scores; one program per row.

    The divergence is over the entries where ``valid`` is True. With ``RANGES`` it is over the entries
    ``begins[row] .. ends[row]`` instead, and nothing outside this range is read or written. ``gradient`` may
    be the same memory as ``attention_sum``.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = 0
    end = width
    if RANGES:
        begin = tl.load(begins + row)
        end = tl.load(ends + row)
    weight = tl.load(row_weights + row)
    lane = tl.arange(0, BLOCK)
    # A finite start: a tile without a valid entry must not compute inf - inf.
    highest = tl.full([], -1.0e30, tl.float32)
    total = tl.zeros([], tl.float32)
    target_total = tl.zeros([], tl.float32)
    for first in range(begin, end, BLOCK):
        entry = row * width + first + lane
        counted = first + lane < end
        if not RANGES:
            counted = tl.load(valid + entry, mask=counted, other=0) != 0
        score = tl.load(scores + entry, mask=counted, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(score, axis=0))
        total = total * tl.exp2((highest - higher) * LOG2E)
        total += tl.sum(tl.exp2((score - higher) * LOG2E), axis=0)
        highest = higher
        target_total += tl.sum(tl.load(attention_sum + entry, mask=counted, other=0.0), axis=0)
    log_total = tl.log(tl.where(total > 0, total, 1.0))
    # Smallest normal number: a smaller total is no sum of probabilities, but an empty row.
    norm = 1.0 / tl.maximum(target_total, 1.1754943508222875e-38)
    terms = tl.zeros([BLOCK], tl.float32)
    for first in range(begin, end, BLOCK):
        entry = row * width + first + lane
        inside = first + lane < end
        counted = inside
        if not RANGES:
            counted = tl.load(valid + entry, mask=inside, other=0) != 0
        # Subtract the highest score first: added to it, the logarithm of the sum might be lost in rounding.
        log_r = tl.where(counted, tl.load(scores + entry, mask=counted, other=0.0) - highest - log_total, 0.0)
        p = tl.load(attention_sum + entry, mask=counted, other=0.0) * norm
        terms += tl.where(p > 0, p * (tl.log(tl.where(p > 0, p, 1.0)) - log_r), 0.0)
        if WITH_GRADIENT:
            difference = tl.where(counted, tl.exp2(log_r * LOG2E) - p, 0.0)
            tl.store(gradient + entry, difference * weight, mask=inside)
    # A row with weight 0 must not spread infinities or NaN: 0 * inf is not 0.
    tl.store(losses + row, tl.where(weight != 0, tl.sum(terms, axis=0) * weight, 0.0))


@triton.jit
def add_piece(
    scores, query, key, is_row, inside, piece, DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr
):
    """Add partial dot products of queries and keys to ``scores``, ``[M, N]``, and return the sums.

    The products cover the ``BLOCK_D`` columns from ``piece * BLOCK_D`` on. ``query`` and ``key`` are pointers
    to the starts of the query rows, ``[M]``, and of the keys, ``[N]``.
    """
    column = piece * BLOCK_D + tl.arange(0, BLOCK_D)
    row_mask, key_mask = is_row[:, None], inside[:, None]
    if DIM % BLOCK_D != 0:
        row_mask, key_mask = row_mask & (column < DIM)[None, :], key_mask & (column < DIM)[None, :]
    q = tl.load(query[:, None] + column[None, :], mask=row_mask, other=0.0)
    k = tl.load(key[:, None] + column[None, :], mask=key_mask, other=0.0)
    return product(q, tl.trans(k), scores, WIDEN)


@triton.jit
def dense_lse_kernel(
    query,
    key,
    starts,
    ends,
    lse,
    rows,
    heads,
    key_length,
    query_row,
    query_head,
    key_row,
    key_head,
    scale_log2,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute log2 of the sum of exponentials, ``[rows, heads]``; one program per head and block of rows.

    One loop covers all tiles of keys and all pieces of their columns, so that loads are always pipelined.
    """
    head = (tl.program_id(0) % heads).to(tl.int64)
    row = (tl.program_id(0) // heads) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < rows
    low = tl.load(starts + row, mask=is_row, other=0)
    high = tl.load(ends + row, mask=is_row, other=0)
    first_key = tl.min(tl.where(low < high, low, key_length), axis=0)
    last_key = tl.max(tl.where(low < high, high, 0), axis=0)
    query_rows = query + row.to(tl.int64) * query_row + head * query_head
    PIECES: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    highest = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.cdiv(tl.maximum(last_key - first_key, 0), BLOCK_N) * PIECES):
        position = first_key + step // PIECES * BLOCK_N + tl.arange(0, BLOCK_N)
        key_rows = key + position.to(tl.int64) * key_row + head * key_head
        inside = position < last_key
        scores = add_piece(scores, query_rows, key_rows, is_row, inside, step % PIECES, DIM, BLOCK_D, WIDEN)
        if step % PIECES == PIECES - 1:
            seen = (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
            scores = tl.where(seen, scores * scale_log2, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, axis=1))
            total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(scores - higher[:, None]), axis=1)
            highest = higher
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Rows that see nothing get some finite number, which is never read.
    result = highest + tl.log2(tl.where(total > 0, total, 1.0))
    tl.store(lse + row.to(tl.int64) * heads + head, result, mask=is_row)


@triton.jit
def dense_sum_kernel(
    query,
    key,
    starts,
    ends,
    lse,
    slab,
    rows,
    heads,
    key_length,
    query_row,
    query_head,
    key_row,
    key_head,
    scale_log2,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVERYWHERE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Sum probabilities over heads, in head order; one program per block of rows and tile of keys.

    ``slab`` is ``[rows, key_length]``. Tiles that no row of the block sees are skipped, or zeroed with
    ``EVERYWHERE``. One loop covers all heads and all pieces of their columns.
    """
    tiles = tl.cdiv(key_length, BLOCK_N)
    position = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (tl.program_id(0) // tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < rows
    low = tl.load(starts + row, mask=is_row, other=0)
    high = tl.load(ends + row, mask=is_row, other=0)
    lowest = tl.min(tl.where(low < high, low, key_length), axis=0)
    highest = tl.max(tl.where(low < high, high, 0), axis=0)
    first_key = (tl.program_id(0) % tiles) * BLOCK_N
    inside = position < key_length
    row_offsets = row.to(tl.int64)
    entry = slab + row_offsets[:, None] * key_length + position[None, :]
    written = is_row[:, None] & inside[None, :]
    if (first_key < highest) & (first_key + BLOCK_N > lowest):
        query_rows = query + row_offsets * query_row
        key_rows = key + position.to(tl.int64) * key_row
        PIECES: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
        summed = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(heads * PIECES):
            head = tl.cast(step // PIECES, tl.int64)
            scores = add_piece(
                scores,
                query_rows + head * query_head,
                key_rows + head * key_head,
                is_row,
                inside,
                step % PIECES,
                DIM,
                BLOCK_D,
                WIDEN,
            )
            if step % PIECES == PIECES - 1:
                norm = tl.load(lse + row_offsets * heads + head, mask=is_row, other=0.0)
                seen = (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
                # Masked before the exponential, which may overflow: an unseen score may be larger than any
                # lse.
                summed += tl.exp2(tl.where(seen, scores * scale_log2 - norm[:, None], float("-inf")))
                scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        tl.store(entry, summed, mask=written)
    elif EVERYWHERE:
        tl.store(entry, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), mask=written)


@triton.jit
def dense_key_gradient_kernel(
    grad_scores,
    query,
    key,
    weights,
    starts,
    ends,
    grad_key,
    rows,
    key_length,
    grad_split,
    query_row,
    query_head,
    key_row,
    weight_row,
    weight_head,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    USE_RELU: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute partial key gradients; one program per tile of keys and per one of ``SPLITS`` row ranges.

    No other program adds to the same part of ``grad_key``, which is ``[SPLITS, keys, dim]`` fp32 with a
    stride of ``grad_split`` for the first axis. ``grad_scores`` is ``[rows, key_length]``.
    """
    split = tl.program_id(0) % SPLITS
    first_key = (tl.program_id(0) // SPLITS) * BLOCK_N
    position = first_key + tl.arange(0, BLOCK_N)
    inside = position < key_length
    share = tl.cdiv(rows, SPLITS)
    # The range of rows that see one of these keys.
    begin = rows
    end = 0
    for first in range(split * share, tl.minimum((split + 1) * share, rows), BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        is_row = (row < (split + 1) * share) & (row < rows)
        low = tl.load(starts + row, mask=is_row, other=0)
        high = tl.load(ends + row, mask=is_row, other=0)
        sees = (low < high) & (low < first_key + BLOCK_N) & (high > first_key)
        begin = tl.minimum(begin, tl.min(tl.where(sees, row, rows), axis=0))
        end = tl.maximum(end, tl.max(tl.where(sees, row + 1, 0), axis=0))
    if begin < end:
        keys = load_rows(key, position.to(tl.int64) * key_row, inside, 0, DIM, BLOCK_D)
        head = tl.arange(0, BLOCK_J)
        is_head = head < HEADS
        q_offsets = head.to(tl.int64) * query_head
        out_offsets = split.to(tl.int64) * grad_split + position.to(tl.int64) * DIM
        acc = load_rows(grad_key, out_offsets, inside, 0, DIM, BLOCK_D)
        for index in range(begin, end):
            at = tl.cast(index, tl.int64)
            seen = inside & (position >= tl.load(starts + at)) & (position < tl.load(ends + at))
            q = load_rows(query + at * query_row, q_offsets, is_head, 0, DIM, BLOCK_D)
            w = tl.load(weights + at * weight_row + head.to(tl.int64) * weight_head, mask=is_head, other=0.0)
            gradient = tl.load(grad_scores + at * key_length + position, mask=seen, other=0.0)
            grad_products = gradient[:, None] * w.to(tl.float32)[None, :]
            if USE_RELU:
                # [N, J]; the derivative of relu at zero is zero.
                products = product(keys, tl.trans(q), tl.zeros([BLOCK_N, BLOCK_J], tl.float32), WIDEN)
                grad_products = tl.where(products > 0, grad_products, 0.0)
            acc = product(grad_products.to(keys.dtype), q, acc, WIDEN)
        store_rows(grad_key, out_offsets, inside, acc, 0, DIM, BLOCK_D)
