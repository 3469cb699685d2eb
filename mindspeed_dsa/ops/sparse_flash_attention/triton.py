"""Sparse flash attention in Triton, for CUDA devices.

The backward recomputes the probabilities once, tile of keys by tile of keys, over all heads: the gradient of
a key leaves a program once per row that selected it, whatever the number of heads. The gradient of the
scores goes through memory to a second kernel, which is a plain product with the gathered keys. Rows are cut
into chunks that bound this memory.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass, takes_every_call
from mindspeed_dsa.ops.precision import gradient_dtype, raising_factor
from mindspeed_dsa.ops.sparse_flash_attention.triton_kernels import (
    attention_sum_kernel,
    backward_keys_kernel,
    backward_query_kernel,
    delta_kernel,
    forward_kernel,
)
from mindspeed_dsa.ops.triton_common import (
    LOG2E,
    WORKSPACE_BYTES,
    add_rows_by_key,
    aligned,
    block,
    dense_rows,
    dim_blocks,
    key_ids,
    on_blackwell,
    packed_indices,
    row_lengths,
    unsupported_dims,
    unsupported_here,
    widen,
)

__all__ = ["KIND", "attention_sum", "backward", "forward", "log_sum_exp", "plan_call", "unsupported"]

KIND: Literal["gradients"] = "gradients"
plan_call = takes_every_call


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
    value_dim = shape["value_dim"]
    return (
        unsupported_here(shape)
        or unsupported_dims(value_dim, shape["dim"] - value_dim)
        or _unsupported_on_blackwell(shape)
    )


def _unsupported_on_blackwell(shape: ShapeClass) -> str | None:
    """Why tiles that fit Hopper do not fit there, or None; fp32 has smaller ones."""
    if shape["heads"] <= 16 or shape.dtype == torch.float32 or not on_blackwell(shape):
        return None
    return (
        "on compute capability 10.x its tiles of more than 16 heads take up to 293 KiB of shared memory, and "
        f"there are 227; these are {shape['heads']} heads, which tensor parallelism would cut"
    )


def forward(
    query: Tensor,
    key_value: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    value_dim: int,
    return_attention_sum: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The three parts of :class:`SparseAttentionOutput`; the sum needs a second, lighter kernel."""
    batch, rows, heads, _ = query.shape
    out = torch.empty(batch, rows, heads, value_dim, dtype=query.dtype, device=query.device)
    lse = _forward(query, key_value, topk_indices, softmax_scale, value_dim, out)
    summed = None
    if return_attention_sum:
        summed = attention_sum(query, key_value, topk_indices, lse, softmax_scale, value_dim)
    return out, lse, summed


def log_sum_exp(
    query: Tensor, key_value: Tensor, topk_indices: Tensor, softmax_scale: float, value_dim: int
) -> Tensor:
    """``[batch, rows, heads]`` fp32, without the output."""
    return _forward(query, key_value, topk_indices, softmax_scale, value_dim, None)


def _forward(
    query: Tensor,
    key_value: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    value_dim: int,
    out: Tensor | None,
) -> Tensor:
    query, key_value, topk_indices = dense_rows(query), dense_rows(key_value), packed_indices(topk_indices)
    batch, rows, heads, dim = query.shape
    lse = torch.empty(batch, rows, heads, dtype=torch.float32, device=query.device)
    if lse.numel() == 0:
        return lse
    tiles = _forward_tiles(query.dtype, heads)
    forward_kernel[(batch * rows * triton.cdiv(heads, tiles["BLOCK_H"]),)](
        query,
        key_value,
        topk_indices,
        row_lengths(topk_indices, key_value.shape[1]),
        lse if out is None else out,
        lse,
        rows,
        key_value.shape[1],
        heads,
        topk_indices.shape[2],
        *query.stride()[:3],
        *key_value.stride()[:2],
        softmax_scale * LOG2E,
        WITH_OUT=out is not None,
        WIDEN=widen(query),
        **dim_blocks(value_dim, dim),
        **tiles,
    )
    return lse


def attention_sum(
    query: Tensor,
    key_value: Tensor,
    topk_indices: Tensor,
    lse: Tensor,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """Probabilities summed over heads, in head order: ``[batch, rows, topk]`` fp32, 0 without a key."""
    query, key_value, topk_indices = dense_rows(query), dense_rows(key_value), packed_indices(topk_indices)
    batch, rows, heads, dim = query.shape
    summed = torch.empty(topk_indices.shape, dtype=torch.float32, device=query.device)
    if summed.numel() == 0:
        return summed
    tiles = _sum_tiles(query.dtype, heads)
    topk = topk_indices.shape[2]
    attention_sum_kernel[(batch * rows * triton.cdiv(topk, tiles["BLOCK_N"]),)](
        query,
        key_value,
        topk_indices,
        row_lengths(topk_indices, key_value.shape[1]),
        lse.contiguous(),
        summed,
        rows,
        key_value.shape[1],
        heads,
        topk,
        *query.stride()[:3],
        *key_value.stride()[:2],
        softmax_scale * LOG2E,
        WIDEN=widen(query),
        **dim_blocks(value_dim, dim),
        **tiles,
    )
    return summed


def backward(
    grad_out: Tensor,
    query: Tensor,
    key_value: Tensor,
    topk_indices: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    return_attention_sum: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of query and key_value, from the ``out`` and ``lse`` that :func:`forward` returned.

    The third part is the sum of the probabilities over heads, as in :func:`forward`, or None. The gradient
    of the keys is added with fp32 atomics, in no fixed order, unless
    ``torch.use_deterministic_algorithms`` is on; everything else is always deterministic.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    query, key_value, topk_indices = dense_rows(query), dense_rows(key_value), packed_indices(topk_indices)
    grad_out = dense_rows(grad_out)
    (batch, rows, heads, dim), topk = query.shape, topk_indices.shape[2]
    key_length, value_dim, device = key_value.shape[1], out.shape[3], query.device
    factor = None
    if query.dtype == torch.float16 and grad_out.numel() > 0:
        # The kernel rounds the gradient of the scores, smaller than this by a probability, to fp16.
        factor = raising_factor(grad_out.abs().amax().float(), 1)
        grad_out = (grad_out.float() * factor).to(grad_out.dtype)
    grad_query = torch.empty(query.shape, dtype=gradient_dtype(query.dtype), device=device)
    grad_key_value = torch.zeros(batch * key_length, dim, dtype=torch.float32, device=device)
    summed = None
    if return_attention_sum:
        summed = torch.zeros(topk_indices.shape, dtype=torch.float32, device=device)
    if topk_indices.numel() > 0:
        lengths = row_lengths(topk_indices, key_length)
        delta = _delta(grad_out, out)
        constants = dim_blocks(value_dim, dim) | {"WIDEN": widen(query)}
        key_tiles, query_tiles = _backward_keys_tiles(query.dtype, heads), _forward_tiles(query.dtype, heads)
        row_bytes = topk * (heads * query.element_size() + (4 * dim if deterministic else 0))
        chunk = max(1, min(batch * rows, WORKSPACE_BYTES // row_bytes))
        grad_scores = torch.empty(chunk, topk, heads, dtype=query.dtype, device=device)
        gathered = torch.empty(chunk, topk, dim, device=device) if deterministic else None
        for first in range(0, batch * rows, chunk):
            count = min(chunk, batch * rows - first)
            backward_keys_kernel[(count * triton.cdiv(topk, key_tiles["BLOCK_N"]),)](
                query,
                key_value,
                topk_indices,
                lengths,
                grad_out,
                lse,
                delta,
                grad_scores,
                lse if summed is None else summed,
                grad_key_value if gathered is None else gathered,
                first,
                rows,
                key_length,
                heads,
                topk,
                *query.stride()[:3],
                *key_value.stride()[:2],
                *grad_out.stride()[:3],
                softmax_scale,
                softmax_scale * LOG2E,
                WITH_SUM=summed is not None,
                ATOMIC=gathered is None,
                ALIGNED=aligned(query) and aligned(grad_out),
                **constants,
                **key_tiles,
            )
            backward_query_kernel[(count * triton.cdiv(heads, query_tiles["BLOCK_H"]),)](
                key_value,
                topk_indices,
                lengths,
                grad_scores,
                grad_query,
                first,
                rows,
                key_length,
                heads,
                topk,
                *key_value.stride()[:2],
                **constants,
                **query_tiles,
            )
            if gathered is not None:
                ids = key_ids(topk_indices, key_length, first, count)
                add_rows_by_key(grad_key_value, gathered[:count], ids)
    else:
        grad_query.zero_()
    if factor is not None:
        grad_query, grad_key_value = grad_query.div_(factor), grad_key_value.div_(factor)
    return grad_query.to(query.dtype), grad_key_value.view(key_value.shape).to(key_value.dtype), summed


def _delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """``[batch, rows, heads]`` fp32: output times its gradient, summed over the value dimension."""
    batch, rows, heads, value_dim = out.shape
    delta = torch.empty(batch, rows, heads, dtype=torch.float32, device=out.device)
    delta_kernel[(batch * rows * triton.cdiv(heads, 16),)](
        grad_out,
        out,
        delta,
        rows,
        heads,
        *grad_out.stride()[:3],
        VALUE_DIM=value_dim,
        BLOCK_V=block(value_dim),
        BLOCK_H=16,
        num_warps=4,
    )
    return delta


def _forward_tiles(dtype: torch.dtype, heads: int) -> dict[str, Any]:
    """Programs hold an output of BLOCK_H x 512 in registers: 64 heads fill 8 warps."""
    if dtype == torch.float32:
        return {"BLOCK_H": 16, "BLOCK_N": 16, "num_warps": 8, "num_stages": 2}
    if heads > 32:
        return {"BLOCK_H": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
    return {"BLOCK_H": block(heads), "BLOCK_N": 32, "num_warps": 4, "num_stages": 3}


def _sum_tiles(dtype: torch.dtype, heads: int) -> dict[str, Any]:
    if dtype == torch.float32:
        return {"BLOCK_H": 16, "BLOCK_N": 16, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_H": min(block(heads), 32), "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}


def _backward_keys_tiles(dtype: torch.dtype, heads: int) -> dict[str, Any]:
    """Programs hold a gradient of BLOCK_N x 576 in registers and stream query and output gradient."""
    if dtype == torch.float32:
        return {"BLOCK_H": 16, "BLOCK_N": 16, "num_warps": 8, "num_stages": 1}
    return {"BLOCK_H": min(block(heads), 32), "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
