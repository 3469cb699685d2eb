"""Indexer loss in Triton, for CUDA devices.

The dense form streams rows in slabs. Separate kernels compute the target, the index scores, their divergence,
and the gradients of the indexer's inputs. All of its sums are in a fixed order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.checks import names_key
from mindspeed_dsa.ops.indexer_kl_loss.protocol import DenseCall
from mindspeed_dsa.ops.indexer_kl_loss.triton_kernels import (
    dense_key_gradient_kernel,
    dense_lse_kernel,
    dense_sum_kernel,
    divergence_kernel,
)
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall
from mindspeed_dsa.ops.lightning_indexer.triton import (
    gradient_constants,
    score_slab,
    size_constants,
    slab_rows,
    unsupported_index_sizes,
)
from mindspeed_dsa.ops.lightning_indexer.triton_kernels import score_gradients_kernel
from mindspeed_dsa.ops.precision import gradient_dtype, raising_factor
from mindspeed_dsa.ops.row_ranges import Ranges
from mindspeed_dsa.ops.sparse_flash_attention import triton as attention
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall
from mindspeed_dsa.ops.triton.common import (
    LOG2E,
    block,
    dense_rows,
    fails_to_compile,
    split_dim,
    unsupported_dims,
    unsupported_dtype,
    unsupported_here,
    widen,
)
from mindspeed_dsa.ops.triton.launch import (
    LARGE,
    REHEARSED_KEYS,
    REHEARSED_ROWS,
    meta,
    on_grid,
    shared_memory,
)

# Number of programs that keep a large GPU busy, two per multiprocessor: 2 x 132. For few keys, the keys'
# gradient is therefore summed in several shares of the rows.
_BUSY_PROGRAMS = 264
_MAX_SPLITS = 8

KIND: Literal["gradients"] = "gradients"


def unsupported(shape: ShapeClass) -> str | None:
    """Return why this backend cannot take calls of this shape, or None."""
    return (
        unsupported_here(shape)
        or unsupported_dims(*split_dim(shape["dim"]))
        or unsupported_index_sizes(shape, shape["index_heads"], shape["index_dim"])
        or fails_to_compile(shape, rehearse)
    )


def rehearse(shape: ShapeClass, rows: int = REHEARSED_ROWS, keys: int = REHEARSED_KEYS) -> None:
    """Run the sparse or dense loss on meta tensors, to compile the kernels for this shape."""
    heads, dim, topk, dtype = shape["heads"], shape["dim"], shape["topk"], shape.dtype
    shared = shape["key_heads"] == 1
    query = meta(1, rows, heads, dim, dtype=dtype)
    key = meta(1, keys, *(() if shared else (heads,)), dim, dtype=dtype)
    weights = meta(1, rows, dtype=torch.float32)
    if topk > 0:
        indices, summed = meta(1, rows, topk, dtype=torch.int32), meta(1, rows, topk, dtype=torch.float32)
        if dim > 1:
            attention_sum(AttentionCall(query, key, indices, 1.0, dim), None)
        divergence_and_gradient(summed, summed, names_key(indices, keys), weights, True)
        return
    index_query = meta(1, rows, shape["index_heads"], shape["index_dim"], dtype=dtype)
    index_key = meta(1, keys, shape["index_dim"], dtype=dtype)
    bound = meta(1, rows, dtype=torch.int32)
    index = IndexerCall(index_query, index_key, index_query[..., 0].contiguous())
    dense_loss_and_gradients(DenseCall(index, query, key, 1.0, Ranges(bound, bound, False), weights), True)


def plan_dense(call: DenseCall, row_mask: Tensor | None) -> str | bool:
    """Return whether the mask is known to be causal, or why the indexer's dtype is not supported."""
    return unsupported_dtype(call.index.query.dtype) or call.ranges.plain_causal


def attention_sum(call: AttentionCall, lse: Tensor | None) -> Tensor:
    """Return attention over the selected keys, summed over heads: ``[batch, query_length, topk]`` fp32."""
    call = replace(call, value_dim=split_dim(call.query.shape[3])[0])
    return attention.attention_sum(call, attention.log_sum_exp(call) if lse is None else lse)


def divergence_and_gradient(
    topk_scores: Tensor, attention_sum: Tensor, valid: Tensor, row_weights: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the loss, and its gradient with respect to ``topk_scores``, ``[batch, query_length, topk]``."""
    rows, width = topk_scores.shape[0] * topk_scores.shape[1], topk_scores.shape[2]
    topk_scores, attention_sum, valid = (
        topk_scores.contiguous(),
        attention_sum.contiguous(),
        valid.contiguous(),
    )
    gradient = torch.empty_like(topk_scores) if with_gradient else None  # [batch, query_length, topk]
    losses = torch.empty(rows, dtype=torch.float32, device=topk_scores.device)  # [batch * query_length]
    if rows > 0:
        on_grid(divergence_kernel, rows)(
            topk_scores,
            attention_sum,
            valid,
            losses,
            losses,
            row_weights.contiguous(),
            losses,
            losses if gradient is None else gradient,
            width,
            RANGES=False,
            WITH_GRADIENT=with_gradient,
            BLOCK=1024,
            num_warps=4,
        )
    return losses.sum(dtype=torch.float64).to(topk_scores.dtype), gradient


def dense_loss_and_gradients(
    call: DenseCall, with_gradients: bool
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Return the loss over all visible keys, and its gradients with respect to the indexer's three inputs.

    Gradients of fp16 inputs are in fp32. If rows are known to be causal, keys after a slab's last row are
    skipped, and are not part of the target that is reduced over ranks.
    """
    index_query, index_key, index_weights = call.index.query, call.index.key, call.index.weights
    query, key, softmax_scale, tp_group = call.query, call.key, call.softmax_scale, call.tp_group
    starts, ends, row_weights = call.ranges.starts, call.ranges.ends, call.row_weights
    causal = bool(call.plan)
    index_query, index_key, query, key = map(dense_rows, (index_query, index_key, query, key))
    (batch, query_length), (key_length, index_dim) = query.shape[:2], index_key.shape[1:]
    starts, ends, row_weights = starts.contiguous(), ends.contiguous(), row_weights.contiguous()
    device = query.device
    losses = torch.zeros(batch, query_length, dtype=torch.float32, device=device)
    # The kernels write every row, but without keys no kernel runs.
    new = torch.empty if key_length else torch.zeros
    grad_query, grad_key, grad_weights = (
        new(x.shape, dtype=gradient_dtype(x.dtype), device=device)
        for x in (index_query, index_key, index_weights)
    )
    factor = None
    if index_query.dtype == torch.float16 and row_weights.numel() and index_weights.numel():
        # Kernels round gradient times weight to fp16. A row's gradient is at most the row's weight.
        factor = raising_factor(row_weights.amax() * index_weights.abs().amax().float(), 14)
        row_weights = row_weights * factor
    # With tensor parallelism every rank must cut its rows at the same places, so slabs depend only on the
    # lengths.
    rows = slab_rows(query_length, key_length)
    # Target and scores of a slab
    slabs = torch.empty(2, rows * key_length, dtype=torch.float32, device=device)
    splits = max(1, min(_MAX_SPLITS, _BUSY_PROGRAMS // max(1, triton.cdiv(key_length, 128))))
    for b in range(batch):
        shares = torch.zeros(splits, key_length, index_dim, dtype=torch.float32, device=device)
        for first in range(0, query_length if key_length else 0, rows):
            last = min(first + rows, query_length)
            place, width = (b, slice(first, last)), last if causal else key_length
            # [slab rows, width] each
            target, scores = (slab[: (last - first) * width].view(last - first, width) for slab in slabs)
            everywhere = tp_group is not None
            seen_by = starts[place], ends[place]
            _target(query[place], key[b, :width], softmax_scale, call.sink, *seen_by, target, everywhere)
            if tp_group is not None:
                dist.all_reduce(target, group=tp_group)
            inputs = index_query[place], index_key[b, :width], index_weights[place]
            score_slab(*inputs, starts[place], ends[place], scores, call.index.use_relu)
            on_grid(divergence_kernel, starts[place].numel())(
                scores,
                target,
                target,
                starts[place],
                ends[place],
                row_weights[place],
                losses[place],
                target,
                width,
                RANGES=True,
                WITH_GRADIENT=with_gradients,
                BLOCK=1024,
                num_warps=4,
            )
            if with_gradients:
                seen = shares[:, :width]
                results = grad_query[place], seen, grad_weights[place]
                _gradients(target, inputs, starts[place], ends[place], *results, call.index.use_relu)
        grad_key[b] = shares.sum(0)  # [key_length, index_dim]
    if factor is not None:
        losses /= factor
        for gradient in (grad_query, grad_key, grad_weights) if with_gradients else ():
            gradient /= factor
    gradients = (grad_query, grad_key, grad_weights) if with_gradients else None
    return losses.sum(dtype=torch.float64).to(torch.float32), gradients


def _target(
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    sink: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    slab: Tensor,
    everywhere: bool,
) -> None:
    """Write the probabilities over the visible keys, summed over heads, into ``slab``.

    Args:
        query: ``[rows, heads, dim]``.
        key: ``[key_length, dim]``, or ``[key_length, heads, dim]``.
        softmax_scale: factor of the scores.
        sink: ``[heads]``, or None.
        starts: ``[rows]`` int32.
        ends: ``[rows]`` int32.
        slab: ``[rows, key_length]``.
        everywhere: whether to write zeros for keys that a row does not see; otherwise they stay undefined.
    """
    (rows, heads, dim), key_length = query.shape, key.shape[0]
    shared = key.dim() == 2
    lse = torch.empty(rows, heads, dtype=torch.float32, device=query.device)
    sizes = (rows, heads, key_length, *query.stride()[:2], key.stride(0), 0 if shared else key.stride(1))
    tiles = _dense_tiles(query.dtype)
    constants = {"DIM": dim, "WIDEN": widen(query)} | tiles
    blocks = triton.cdiv(rows, tiles["BLOCK_M"])
    scale_log2 = softmax_scale * LOG2E
    on_grid(dense_lse_kernel, blocks * heads)(query, key, starts, ends, lse, *sizes, scale_log2, **constants)
    if sink is not None:
        # Logarithms to base 2, as in the kernels.
        lse = torch.logaddexp2(lse, sink * LOG2E)
    on_grid(dense_sum_kernel, blocks * triton.cdiv(key_length, tiles["BLOCK_N"]))(
        query,
        key,
        starts,
        ends,
        lse,
        slab,
        *sizes,
        scale_log2,
        EVERYWHERE=everywhere,
        **constants,
    )


def _gradients(
    grad_scores: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    starts: Tensor,
    ends: Tensor,
    grad_query: Tensor,
    grad_key_shares: Tensor,
    grad_weights: Tensor,
    use_relu: bool,
) -> None:
    """Write the gradients for some rows of one sequence, and add to the gradient of the keys.

    Args:
        grad_scores: buffer of at least ``[rows, key_length]`` fp32, read only where a row sees a key.
        inputs: indexer's query ``[rows, heads, dim]``, key ``[key_length, dim]`` and weights
            ``[rows, heads]``.
        starts: ``[rows]`` int32.
        ends: ``[rows]`` int32.
        grad_query: output with the shape of the query.
        grad_key_shares: ``[splits, key_length, dim]`` fp32, possibly a view; the sum over splits is the
            gradient.
        grad_weights: output with the shape of the weights.
        use_relu: whether the product of each head is clamped at zero.
    """
    query, key, weights = inputs
    rows, key_length, splits = query.shape[0], key.shape[0], grad_key_shares.shape[0]
    on_grid(score_gradients_kernel, rows)(
        grad_scores,
        query,
        key,
        weights,
        starts,
        starts,
        ends,
        grad_query,
        grad_key_shares,
        grad_weights,
        0,
        rows,
        key_length,
        key_length,
        0,
        *query.stride()[:2],
        0,
        key.stride(0),
        0,
        *weights.stride(),
        GATHERED=False,
        KEY_GRADIENT="none",
        **gradient_constants(query, use_relu),
    )
    tiles = _key_gradient_tiles(query)
    on_grid(dense_key_gradient_kernel, triton.cdiv(key_length, tiles["BLOCK_N"]) * splits)(
        grad_scores,
        query,
        key,
        weights,
        starts,
        ends,
        grad_key_shares,
        rows,
        key_length,
        grad_key_shares.stride(0),
        *query.stride()[:2],
        key.stride(0),
        *weights.stride(),
        SPLITS=splits,
        BLOCK_R=1024,
        **size_constants(query, use_relu) | tiles,
    )


def _dense_tiles(dtype: torch.dtype) -> dict[str, Any]:
    """Return the tile sizes, which fit any key size: keys are loaded BLOCK_D columns at a time."""
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_D": 128, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 8, "num_stages": 3}


def _key_gradient_tiles(query: Tensor) -> dict[str, Any]:
    """Return the tile sizes. A program keeps gradients of BLOCK_N keys in registers and loops over heads."""
    large = block(query.shape[1]) * block(query.shape[2]) > 64 * 128
    if query.dtype == torch.float32:
        return {"BLOCK_N": 16, "num_warps": 8, "num_stages": 1 if large else 2}
    if large:
        return {"BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    if shared_memory(query.device) < LARGE:
        return {"BLOCK_N": 128, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
