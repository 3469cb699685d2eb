"""Triton kernels of the Lightning Indexer.

Letters in shape comments: N block of keys, J block of indexer heads, D head size, Q block of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mindspeed_dsa.ops.triton.common import add_rows, is_key, load_rows, product, store_rows


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
    """Return the scores of one row with a tile of keys, ``[N]`` fp32; heads are summed in order."""
    scores = tl.zeros([BLOCK_N], tl.float32)
    for first_head in range(0, HEADS, BLOCK_J):
        head = first_head + tl.arange(0, BLOCK_J)
        is_head = head < HEADS
        q = load_rows(query_row_base, head.to(tl.int64) * query_head, is_head, 0, DIM, BLOCK_D)  # [J, D]
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
    factors,
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
    """Compute scores of a block of rows with a tile of keys; one program per block and tile.

    The keys stay in the program, and the rows' heads stream through it. ``slab`` is ``[rows, key_length]``.
    Tiles that no row of the block sees are skipped, not written. Scores are multiplied with the ``factors``
    of their keys, unless ``factors`` is None.
    """
    tiles = tl.cdiv(key_length, BLOCK_N)
    first_key = (tl.program_id(0) % tiles) * BLOCK_N
    first_row = (tl.program_id(0) // tiles) * BLOCK_Q
    row = first_row + tl.arange(0, BLOCK_Q)
    low = tl.load(starts + row, mask=row < rows, other=0)
    high = tl.load(ends + row, mask=row < rows, other=0)
    # Range of keys that some row of the block sees.
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
            if factors is not None:
                scores *= tl.load(factors + position, mask=inside, other=0.0)
            tl.store(slab + at * key_length + position, scores, mask=inside)


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
    """Compute scores of a row with a tile of selected keys, -inf without a key; one program per tile."""
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
    BLOCK_P: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute the gradients of a row's query and weights, and add the row's terms to its keys' gradients.

    One program per row. To save registers, the terms for the keys are computed ``BLOCK_P`` columns at a time;
    all columns at once, if ``DIM`` does not fill its block.

    With ``GATHERED`` the keys are the entries ``0 .. ends[row]`` of ``indices``, otherwise the positions
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
    q_base = query + batch * query_batch + in_batch * query_row
    q_offsets = head.to(tl.int64) * query_head
    q = load_rows(q_base, q_offsets, is_head, 0, DIM, BLOCK_D)
    weights_base = weights + batch * weight_batch + in_batch * weight_row
    w = tl.load(weights_base + head.to(tl.int64) * weight_head, mask=is_head, other=0.0).to(tl.float32)
    acc_query = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    # Tensor cores give a thread two keys of a tile, eight apart. The loop adds up these pairs, and the rest
    # is added after it.
    PAIRS: tl.constexpr = query.dtype.element_ty != tl.float32
    if PAIRS:
        acc_weights = tl.zeros([BLOCK_N // 16, 8, BLOCK_J], tl.float32)
    else:
        acc_weights = tl.zeros([BLOCK_N, BLOCK_J], tl.float32)
    COLUMNS: tl.constexpr = DIM if BLOCK_P == BLOCK_D else BLOCK_P
    begin = 0
    end = tl.load(ends + row)
    if not GATHERED:
        begin = tl.load(begins + row)
    stop = end
    if PAIRS:
        # At least one tile, masked if the row is empty. On a path without a product, the accumulators would
        # be defined outside of the tensor cores, and products would wait for each other.
        stop = tl.maximum(end, begin + 1)
        tl.assume(begin < stop)
    for first in range(begin, stop, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        inside = position < end
        index = position
        if GATHERED:
            index = tl.load(indices + row * width + tl.minimum(position, stop - 1))
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
        weighted = products * gradient.to(tl.float32)[:, None]
        if PAIRS:
            acc_weights += tl.sum(tl.reshape(weighted, [BLOCK_N // 16, 2, 8, BLOCK_J]), axis=1)
        else:
            acc_weights += weighted
        grad_products = grad_products.to(keys.dtype)
        acc_query = product(tl.trans(grad_products), keys, acc_query, WIDEN)
        if KEY_GRADIENT != "none":
            for part in tl.static_range(0, BLOCK_D, BLOCK_P):
                q_part = q
                if BLOCK_P < BLOCK_D:
                    q_part = load_rows(q_base, q_offsets, is_head, part, COLUMNS, BLOCK_P)
                share = product(grad_products, q_part, tl.zeros([BLOCK_N, BLOCK_P], tl.float32), WIDEN)
                if KEY_GRADIENT == "atomic":
                    entry = (batch * key_length + index) * DIM
                    add_rows(grad_key, entry, inside, share, part, COLUMNS, BLOCK_P)
                else:
                    entry = (row_in_chunk * width + position) * DIM
                    store_rows(grad_key, entry, inside, share, part, COLUMNS, BLOCK_P)
    store_rows(grad_query, (row * HEADS + head) * DIM, is_head, acc_query, 0, DIM, BLOCK_D)
    if PAIRS:
        acc_weights = tl.sum(acc_weights, axis=0)
    total = tl.sum(acc_weights, axis=0)
    tl.store(grad_weights + row * HEADS + head, total.to(grad_weights.dtype.element_ty), mask=is_head)
