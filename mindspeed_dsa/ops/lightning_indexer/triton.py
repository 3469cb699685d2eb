"""Lightning Indexer in Triton, for CUDA devices.

Scores of some rows are written to a slab within a byte budget. Then one program per row selects its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass, takes_every_call
from mindspeed_dsa.ops.checks import names_key
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall, pooled, pools_of
from mindspeed_dsa.ops.lightning_indexer.triton_kernels import (
    score_gradients_kernel,
    score_slab_kernel,
    scores_at_kernel,
)
from mindspeed_dsa.ops.lightning_indexer.triton_selection import select_kernel, selection_constants
from mindspeed_dsa.ops.precision import gradient_dtype, raising_factor
from mindspeed_dsa.ops.row_ranges import Ranges
from mindspeed_dsa.ops.triton.common import (
    add_ordered_rows,
    block,
    dense_rows,
    fails_to_compile,
    key_ids,
    order_by_key,
    packed_indices,
    row_lengths,
    tile_bytes,
    unsupported_here,
    widen,
)
from mindspeed_dsa.ops.triton.launch import (
    LARGE,
    REHEARSED_KEYS,
    REHEARSED_ROWS,
    SMALL,
    meta,
    on_grid,
    shared_memory,
)

# Maximum number of rows of scores held at a time, in addition to the limit in bytes. A selection takes more
# rows: for short sequences the two launches per slab would otherwise take longer than the kernels.
SLAB_ROWS, SELECTED_ROWS = 1024, 4096
_SLAB_BYTES = 256 << 20
# A program of the backward holds all heads of a row.
MAX_HEADS, MAX_HEAD_DIM = 128, 256

KIND: Literal["gradients"] = "gradients"
plan_call = takes_every_call


def unsupported(shape: ShapeClass) -> str | None:
    """Return why this backend cannot take calls of this shape, or None."""
    return unsupported_with(shape, rehearse)


def unsupported_with(shape: ShapeClass, rehearse: Callable[[ShapeClass], object]) -> str | None:
    """Return why the kernels that ``rehearse`` launches are not supported for this shape, or None."""
    return (
        unsupported_here(shape)
        or unsupported_index_sizes(shape, shape["heads"], shape["head_dim"])
        or fails_to_compile(shape, rehearse)
    )


def rehearse(
    shape: ShapeClass, rows: int = REHEARSED_ROWS, keys: int = REHEARSED_KEYS, use_relu: bool = True
) -> None:
    """Run selection, scores and gradients on meta tensors, to compile the kernels for this shape."""
    call, topk, ranges = rehearsed_call(shape, rows, keys, use_relu)
    indices, scores = select(call, topk, ranges)
    scores_at(call, indices)
    score_gradients(call, indices, scores)


def rehearsed_call(
    shape: ShapeClass, rows: int, keys: int, use_relu: bool = True
) -> tuple[IndexerCall, int, Ranges]:
    """Return arguments for :func:`select` with meta tensors."""
    heads, dim, dtype = shape["heads"], shape["head_dim"], shape.dtype
    call = IndexerCall(
        meta(1, rows, heads, dim, dtype=dtype),
        meta(1, keys, dim, dtype=dtype),
        meta(1, rows, heads, dtype=dtype),
        use_relu,
    )
    bound = meta(1, rows, dtype=torch.int32)
    return call, min(shape["topk"], keys), Ranges(bound, bound, False)


def unsupported_index_sizes(shape: ShapeClass, heads: int, head_dim: int) -> str | None:
    """Return why an indexer of this size is not supported, or None."""
    if shared_memory(shape.place) == SMALL and _large(heads, head_dim):
        return (
            "its backward holds all indexer heads of a row, on a GPU with 99 KiB of shared memory at most 64 "
            f"of 128 numbers, and these are {heads} of {head_dim}"
        )
    if heads <= MAX_HEADS and head_dim <= MAX_HEAD_DIM:
        return None
    return (
        f"its backward holds all indexer heads of a row, at most {MAX_HEADS} of {MAX_HEAD_DIM} numbers, "
        f"and these are {heads} of {head_dim}"
    )


def select(call: IndexerCall, topk: int, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Return indices and scores of the selected keys, ``[batch, query_length, topk]`` each."""
    query, key, weights = call.query, call.key, call.weights

    def score(b: int, rows: slice, starts: Tensor, ends: Tensor, slab: Tensor) -> None:
        score_slab(query[b, rows], key[b], weights[b, rows], starts, ends, slab, call.use_relu)

    def score_pools(b: int, rows: slice, starts: Tensor, ends: Tensor, slab: Tensor) -> None:
        bounds = ranges.starts[b, rows].contiguous(), ranges.ends[b, rows].contiguous()
        # [rows, key_length]
        wide = torch.empty(len(bounds[0]), key.shape[1], dtype=torch.float32, device=query.device)
        score(b, rows, *bounds, wide)
        slab[: len(wide)] = pooled(wide, *bounds, call.pool)

    if call.pool > 1:
        return select_by(call, topk, pools_of(ranges, call.pool), score_pools)
    return select_by(call, topk, ranges, score)


def select_by(
    call: IndexerCall,
    topk: int,
    ranges: Ranges,
    score: Callable[[int, slice, Tensor, Tensor, Tensor], None],
) -> tuple[Tensor, Tensor]:
    """Select the best keys, with scores from a callback that writes some rows at a time.

    Args:
        call: arguments of the operator.
        topk: number of entries per row.
        ranges: ranges of the keys that each row sees.
        score: function that writes the scores of keys or pools. Its arguments are a sequence's
            number, a slice of its rows, their starts and ends, and a slab for the scores; see
            :func:`score_slab`.

    Returns:
        Indices and scores of the selected keys, ``[batch, query_length, topk]`` each.
    """
    query = call.query
    batch, query_length = query.shape[:2]
    key_length, device = call.key.shape[1], query.device
    topk_indices = torch.empty(batch, query_length, topk, dtype=torch.int32, device=device)
    topk_scores = torch.empty(batch, query_length, topk, dtype=torch.float32, device=device)
    if topk_indices.numel() == 0:
        return topk_indices, topk_scores
    starts, ends = ranges.starts.contiguous(), ranges.ends.contiguous()
    constants = selection_constants(topk)
    length = constants["LIST"]
    rows = selected_rows(query_length, key_length, length)
    choices = triton.cdiv(key_length, call.pool)  # keys, or pools
    slab = torch.empty(rows, choices, dtype=torch.float32, device=device)
    listed_indices = torch.empty(rows, length, dtype=torch.int32, device=device)
    listed_scores = torch.empty(rows, length, dtype=torch.float32, device=device)
    for b in range(batch):
        for first in range(0, query_length, rows):
            place = (b, slice(first, min(first + rows, query_length)))
            score(*place, starts[place], ends[place], slab)
            on_grid(select_kernel, starts[place].numel())(
                slab,
                starts[place],
                ends[place],
                listed_indices,
                listed_scores,
                topk_indices[place],
                topk_scores[place],
                choices,
                topk,
                **constants,
                num_warps=8,
                # Four programs share a multiprocessor: 4 x 256 threads x 64 registers = 65536. This spills a
                # few bytes; the longest lists get more registers.
                maxnreg=max(64, length // 64),
            )
    return topk_indices, topk_scores


def slab_rows(query_length: int, key_length: int) -> int:
    """Return the number of query rows per slab, a buffer for their fp32 scores with all keys."""
    return max(1, min(query_length, SLAB_ROWS, _SLAB_BYTES // (4 * max(key_length, 1))))


def selected_rows(query_length: int, key_length: int, length: int) -> int:
    """Return the number of rows to select for at once: scores and ``length``-entry lists fit the budget."""
    return max(1, min(query_length, SELECTED_ROWS, _SLAB_BYTES // (4 * key_length + 8 * length)))


def score_slab(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    slab: Tensor,
    use_relu: bool,
    factors: Tensor | None = None,
) -> None:
    """Write the scores of some rows of one sequence with the keys that they see into ``slab``.

    Args:
        query: ``[rows, heads, head_dim]``.
        key: ``[key_length, head_dim]``.
        weights: ``[rows, heads]``.
        starts: ``[rows]`` int32.
        ends: ``[rows]`` int32.
        slab: buffer of at least ``[rows, key_length]`` fp32; undefined afterwards where a row does not see a
            key.
        use_relu: whether the product of each head is clamped at zero.
        factors: ``[key_length]`` fp32 factors of the scores, or None.
    """
    query, key = dense_rows(query), dense_rows(key)
    (rows, heads, dim), key_length = query.shape, key.shape[0]
    tiles = _slab_tiles(query, heads, dim)
    blocks = triton.cdiv(rows, tiles["BLOCK_Q"]) * triton.cdiv(key_length, tiles["BLOCK_N"])
    on_grid(score_slab_kernel, blocks)(
        query,
        key,
        weights,
        factors,
        starts,
        ends,
        slab,
        rows,
        key_length,
        *query.stride()[:2],
        key.stride(0),
        *weights.stride(),
        **size_constants(query, use_relu) | tiles,
    )


def scores_at(call: IndexerCall, topk_indices: Tensor) -> Tensor:
    """Return the scores of the keys in ``topk_indices``: ``[batch, query_length, topk]`` fp32."""
    query, key, topk_indices = dense_rows(call.query), dense_rows(call.key), packed_indices(topk_indices)
    (batch, rows, heads, dim), topk = query.shape, topk_indices.shape[2]
    scores = torch.empty(topk_indices.shape, dtype=torch.float32, device=query.device)  # [batch, rows, topk]
    if scores.numel() == 0:
        return scores
    tiles = _entry_tiles(query, heads, dim)
    on_grid(scores_at_kernel, batch * rows * triton.cdiv(topk, tiles["BLOCK_N"]))(
        query,
        key,
        call.weights,
        topk_indices,
        row_lengths(topk_indices, key.shape[1]),
        scores,
        rows,
        key.shape[1],
        topk,
        *query.stride()[:3],
        *key.stride()[:2],
        *call.weights.stride(),
        **size_constants(query, call.use_relu) | tiles,
    )
    return scores


def score_gradients(
    call: IndexerCall, topk_indices: Tensor, grad_scores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the scores at ``topk_indices`` with respect to query, key and weights.

    The key's gradient is added with fp32 atomics, in no fixed order, unless
    ``torch.use_deterministic_algorithms`` is on; the other two are always deterministic.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    query, key, weights = dense_rows(call.query), dense_rows(call.key), call.weights
    topk_indices = packed_indices(topk_indices)
    (batch, rows, _, dim), (key_length, topk) = query.shape, (key.shape[1], topk_indices.shape[2])
    grad_query = torch.empty(query.shape, dtype=gradient_dtype(query.dtype), device=query.device)
    grad_weights = torch.empty(weights.shape, dtype=gradient_dtype(weights.dtype), device=query.device)
    grad_key = torch.zeros(batch * key_length, dim, dtype=torch.float32, device=query.device)
    factor = None
    if topk_indices.numel() > 0:
        if query.dtype == torch.float16:
            # The kernel rounds gradient times weight to fp16, the dtype of the query.
            grad_scores = grad_scores.masked_fill(~names_key(topk_indices, key_length), 0)
            factor = raising_factor(grad_scores.abs().amax() * weights.abs().amax().float(), 14)
            grad_scores = grad_scores * factor
        grad_scores = grad_scores.contiguous().view(batch * rows, topk)  # [batch * rows, topk]
        lengths = row_lengths(topk_indices, key_length)
        chunk = batch * rows
        if deterministic:
            chunk = max(1, min(chunk, tile_bytes(grad_key) // (4 * topk * dim)))
        tiles = torch.empty(chunk, topk, dim, device=query.device) if deterministic else None
        for first in range(0, batch * rows, chunk):
            count = min(chunk, batch * rows - first)
            on_grid(score_gradients_kernel, count)(
                grad_scores[first:],
                query,
                key,
                weights,
                topk_indices,
                lengths,
                lengths,
                grad_query,
                grad_key if tiles is None else tiles,
                grad_weights,
                first,
                rows,
                key_length,
                topk,
                *query.stride()[:3],
                *key.stride()[:2],
                *weights.stride(),
                GATHERED=True,
                KEY_GRADIENT="atomic" if tiles is None else "tiles",
                **gradient_constants(query, call.use_relu),
            )
            if tiles is not None:
                of_chunk = topk_indices.view(batch * rows, topk)[first : first + count]  # [count, topk]
                ids = key_ids(of_chunk, first, rows, key_length, batch * key_length)
                add_ordered_rows(grad_key, tiles[:count], order_by_key(ids, len(grad_key), len(ids)), 0)
    else:
        grad_query.zero_()
        grad_weights.zero_()
    if factor is not None:
        grad_query, grad_key, grad_weights = (x.div_(factor) for x in (grad_query, grad_key, grad_weights))
    return (
        grad_query.to(query.dtype),
        grad_key.view(key.shape),  # [batch, key_length, head_dim]
        grad_weights.to(weights.dtype),
    )


def gradient_constants(query: Tensor, use_relu: bool) -> dict[str, Any]:
    """Return the gradient kernel's constexpr arguments and tile sizes."""
    return size_constants(query, use_relu) | _gradient_tiles(query, *query.shape[-2:])


def size_constants(query: Tensor, use_relu: bool) -> dict[str, Any]:
    """Return constexpr arguments for the indexer's size, for kernels that process all heads of a row."""
    heads, dim = query.shape[-2:]
    return {
        "HEADS": heads,
        "DIM": dim,
        "BLOCK_D": block(dim),
        "BLOCK_J": block(heads),
        "USE_RELU": use_relu,
        "WIDEN": widen(query),
    }


def _slab_tiles(query: Tensor, heads: int, dim: int) -> dict[str, Any]:
    """Return the tile sizes of the kernel that computes scores."""
    if query.dtype == torch.float32:
        return {"BLOCK_J": 16, "BLOCK_N": 64, "BLOCK_Q": 32, "num_warps": 8, "num_stages": 2}
    # All heads form one block, because only the loop over rows is pipelined.
    tiles = {"BLOCK_J": block(heads), "BLOCK_Q": 32, "num_warps": 8}
    if block(heads) * block(dim) > 128 * 128:
        return tiles | {"BLOCK_N": 64, "num_stages": 2}
    wide = shared_memory(query.device) == LARGE and not _large(heads, dim)
    return tiles | {"BLOCK_N": 256 if wide else 128, "num_stages": 3}


def _entry_tiles(query: Tensor, heads: int, dim: int) -> dict[str, Any]:
    """Return the tile sizes for kernels that gather the selected keys of one row."""
    if query.dtype == torch.float32:
        return {"BLOCK_J": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    if shared_memory(query.device) == LARGE and not _large(heads, dim):
        return {"BLOCK_J": block(heads), "BLOCK_N": 256, "num_warps": 8, "num_stages": 1}
    return {"BLOCK_J": block(heads), "BLOCK_N": 64, "num_warps": 4, "num_stages": 1}


def _gradient_tiles(query: Tensor, heads: int, dim: int) -> dict[str, Any]:
    whole = {"BLOCK_P": block(dim), "num_warps": 8}
    if query.dtype == torch.float32:
        return whole | {"BLOCK_N": 16, "num_stages": 1 if _large(heads, dim) else 2}
    if _large(heads, dim):
        # A second stage would leave no registers for products that overlap.
        return whole | {"BLOCK_N": 32, "num_stages": 1}
    if shared_memory(query.device) < LARGE:
        # Products of single warps keep more in registers: with four warps a thread would spill up to 4 KB.
        return whole | {"BLOCK_N": 64, "num_stages": 3}
    part = 32 if block(dim) == dim > 32 else block(dim)
    return {"BLOCK_P": part, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}


def _large(heads: int, dim: int) -> bool:
    """Return whether the indexer is larger than DeepSeek-V3.2's (64 heads x 128), which fits on every GPU."""
    return block(heads) * block(dim) > 64 * 128
