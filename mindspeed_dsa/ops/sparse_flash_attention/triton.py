"""Sparse flash attention in Triton, for CUDA devices.

The backward recomputes the probabilities once, one tile of keys at a time over all heads. The gradient of a
key is written once per row that selected it, for any number of heads, and on Hopper once per up to four
neighboring rows. The gradient of the scores is stored in memory for a second kernel, which multiplies it with
the gathered keys. Rows are split into chunks that bound this memory. On Hopper one kernel can compute all
gradients of a row; :func:`hopper.prefers_rows` says where it does.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass, takes_every_call
from mindspeed_dsa.ops.precision import gradient_dtype, raising_factor
from mindspeed_dsa.ops.sparse_flash_attention import hopper
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall, add_sink
from mindspeed_dsa.ops.sparse_flash_attention.shared_tiles import (
    added_by_others,
    share_tiles,
    tasks_of,
    whole_chunk,
)
from mindspeed_dsa.ops.sparse_flash_attention.triton_kernels import (
    attention_sum_kernel,
    backward_keys_kernel,
    backward_query_kernel,
    delta_kernel,
    forward_kernel,
)
from mindspeed_dsa.ops.triton.common import (
    LOG2E,
    WORKSPACE_BYTES,
    add_ordered_rows,
    aligned,
    block,
    dense_rows,
    dim_blocks,
    fails_to_compile,
    key_ids,
    order_by_key,
    packed_indices,
    row_lengths,
    tile_bytes,
    unsupported_dims,
    unsupported_here,
    widen,
)
from mindspeed_dsa.ops.triton.launch import (
    HOPPER,
    LARGE,
    REHEARSED_KEYS,
    REHEARSED_ROWS,
    SMALL,
    capability_of,
    meta,
    on_blackwell,
    on_grid,
    shared_memory,
)

__all__ = [
    "KIND",
    "TAKES_PARTS",
    "attention_sum",
    "backward",
    "forward",
    "log_sum_exp",
    "plan_call",
    "unsupported",
]

KIND: Literal["gradients"] = "gradients"
TAKES_PARTS = False
# Entries of a row per launch of the backward by rows in a fixed order: a workspace of 512 MiB then holds the
# gradients of at least 113 rows, and an H100 has 132 multiprocessors.
ROW_ENTRIES = 2048
plan_call = takes_every_call


def unsupported(shape: ShapeClass) -> str | None:
    """Return why this backend cannot take calls of this shape, or None."""
    value_dim = shape["value_dim"]
    reason = unsupported_here(shape) or unsupported_dims(value_dim, shape["dim"] - value_dim)
    if reason is None and shape.device == "cuda" and capability_of(shape.place) == HOPPER:
        hopper.warn_of_plain_kernels()
    return reason or fails_to_compile(shape, rehearse)


def rehearse(
    shape: ShapeClass,
    rows: int = REHEARSED_ROWS,
    keys: int = REHEARSED_KEYS,
    sums: tuple[bool, ...] = (True, False),
) -> None:
    """Run forward and backward on meta tensors, to compile the kernels.

    ``sums`` has the values of ``with_sum`` for which the backward runs.
    """
    heads, dim, value_dim = shape["heads"], shape["dim"], shape["value_dim"]
    query, key = meta(1, rows, heads, dim, dtype=shape.dtype), meta(1, keys, dim, dtype=shape.dtype)
    indices = meta(1, rows, shape["topk"], dtype=torch.int32)
    call = AttentionCall(query, key, indices, 1.0, value_dim)
    out, lse, _ = forward(call, True)
    for with_sum in sums:
        backward(call, out, out, lse, with_sum)


def forward(call: AttentionCall, with_sum: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the three fields of :class:`SparseAttentionOutput`.

    A second, cheaper kernel computes ``attention_sum``.
    """
    query = call.query
    # [batch, rows, heads, value_dim]
    out = torch.empty(*query.shape[:3], call.value_dim, dtype=query.dtype, device=query.device)
    lse = add_sink(call.sink, _forward(call, out), out)
    return out, lse, attention_sum(call, lse) if with_sum else None


def log_sum_exp(call: AttentionCall) -> Tensor:
    """Return the log-sum-exp, ``[batch, rows, heads]`` fp32, without computing the output."""
    return add_sink(call.sink, _forward(call, None))


def _forward(call: AttentionCall, out: Tensor | None) -> Tensor:
    query, key_value, topk_indices = _operands(call)
    softmax_scale, value_dim = call.softmax_scale, call.value_dim
    batch, rows, heads, dim = query.shape
    lse = torch.empty(batch, rows, heads, dtype=torch.float32, device=query.device)
    if lse.numel() == 0:
        return lse
    lengths = row_lengths(topk_indices, key_value.shape[1])
    if out is not None and hopper.takes(query, key_value, value_dim):
        hopper.forward(query, key_value, topk_indices, lengths, softmax_scale, out, lse)
        return lse
    tiles = _forward_tiles(query, heads)
    on_grid(forward_kernel, batch * rows * triton.cdiv(heads, tiles["BLOCK_H"]))(
        query,
        key_value,
        topk_indices,
        lengths,
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


def attention_sum(call: AttentionCall, lse: Tensor) -> Tensor:
    """Return the probabilities summed over heads in order: ``[batch, rows, topk]`` fp32, 0 without a key."""
    query, key_value, topk_indices = _operands(call)
    softmax_scale, value_dim = call.softmax_scale, call.value_dim
    batch, rows, heads, dim = query.shape
    summed = torch.empty(topk_indices.shape, dtype=torch.float32, device=query.device)  # [batch, rows, topk]
    if summed.numel() == 0:
        return summed
    lengths = row_lengths(topk_indices, key_value.shape[1])
    if hopper.takes_sum(query, key_value, value_dim):
        hopper.attention_sum(query, key_value, topk_indices, lengths, lse.contiguous(), softmax_scale, summed)
        return summed
    tiles = _sum_tiles(query, heads)
    topk = topk_indices.shape[2]
    on_grid(attention_sum_kernel, batch * rows * triton.cdiv(topk, tiles["BLOCK_N"]))(
        query,
        key_value,
        topk_indices,
        lengths,
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
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, with_sum: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of query and key_value, given the ``out`` and ``lse`` of :func:`forward`.

    The third result is the sum of the probabilities over heads, as in :func:`forward`, or None. The gradient
    of the keys is added with fp32 atomics, in no fixed order, unless
    ``torch.use_deterministic_algorithms`` is on; all other results are deterministic.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    query, key_value, topk_indices = _operands(call)
    softmax_scale, value_dim, grad_out = call.softmax_scale, call.value_dim, dense_rows(grad_out)
    batch, key_length, dim = key_value.shape
    device = query.device
    factor = None
    if query.dtype == torch.float16 and grad_out.numel() > 0:
        # The kernel rounds the gradient of the scores to fp16. It is smaller than grad_out by a probability.
        factor = raising_factor(grad_out.abs().amax().float(), 1)
        grad_out = (grad_out.float() * factor).to(grad_out.dtype)
    grad_query = torch.empty(query.shape, dtype=gradient_dtype(query.dtype), device=device)
    grad_key_value = torch.zeros(batch * key_length, dim, dtype=torch.float32, device=device)
    summed = None
    if with_sum:
        summed = torch.zeros(topk_indices.shape, dtype=torch.float32, device=device)  # [batch, rows, topk]
    if topk_indices.numel() > 0:
        lengths = row_lengths(topk_indices, key_length)
        inputs = (query, key_value, grad_out, lse, _delta(grad_out, out))
        results = (grad_query, grad_key_value, summed)
        by_rows = hopper.prefers_rows(query.shape[2], deterministic)
        if by_rows and hopper.takes_rows(query, key_value, grad_out, value_dim):
            _backward_by_rows(inputs, results, topk_indices, lengths, softmax_scale, deterministic)
        else:
            _backward_by_tiles(call, inputs, results, topk_indices, lengths, deterministic)
    else:
        grad_query.zero_()
    if factor is not None:
        grad_query, grad_key_value = grad_query.div_(factor), grad_key_value.div_(factor)
    # grad_key_value: [batch * key_length, dim] -> [batch, key_length, dim]
    return grad_query.to(query.dtype), grad_key_value.view(key_value.shape), summed


def _backward_by_rows(
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor, Tensor | None],
    topk_indices: Tensor,
    lengths: Tensor,
    softmax_scale: float,
    deterministic: bool,
) -> None:
    """Compute all gradients of a row in one kernel; those of keys are summed in a fixed order on request."""
    grad_query, grad_keys, summed = results
    batch, rows_of_batch, topk = topk_indices.shape
    rows, (keys, dim), key_length = batch * rows_of_batch, grad_keys.shape, len(grad_keys) // batch
    indices, grad_query = topk_indices.view(rows, topk), grad_query.view(rows, -1, dim)
    summed = None if summed is None else summed.view(rows, topk)
    if deterministic:
        # Rows pass in parts, so that a launch has as many programs however many keys a row selects.
        entries, heads = min(topk, ROW_ENTRIES), grad_query.shape[1]
        parts = [slice(begin, begin + entries) for begin in range(0, topk, entries)]
        several = len(parts) > 1
        ends = [(lengths - part.start).clamp(0, entries) for part in parts]
        chunk = min(rows, rows_per_launch(topk, heads, dim, tile_bytes(grad_keys)))
        workspace = grad_keys.new_empty(chunk * entries, dim)
        # Chunks are sorted together: a sort takes up to 32 bytes per entry.
        sorted_rows = max(1, WORKSPACE_BYTES // 32 // (chunk * topk)) * chunk
        for first in range(0, rows, chunk):
            if first % sorted_rows == 0:
                ids = key_ids(indices[first : first + sorted_rows], first, rows_of_batch, key_length, keys)
                orders = [order_by_key(ids[:, part], keys, chunk) for part in parts]
            of_chunk = range(first, min(first + chunk, rows))
            here = slice(first, of_chunk.stop)
            of_part = of_queries = grad_query[here]
            if several:
                of_part = torch.empty_like(of_queries, dtype=torch.float32)
                query_sums = torch.zeros_like(of_part)
            for part, end, order in zip(parts, ends, orders, strict=True):
                # Copies of a part; a whole row is passed itself.
                chosen = indices[here, part].contiguous()
                sum_part = None if summed is None else summed[here, part].contiguous()
                gathered = workspace[: chosen.numel()].view(*chosen.shape, dim)
                if hopper.adds_to_entries(heads):
                    gathered.zero_()
                found = of_part, gathered, sum_part
                hopper.gradients_of_rows(inputs, found, chosen, end, of_chunk, softmax_scale, True)
                add_ordered_rows(grad_keys, gathered, order, first % sorted_rows // chunk)
                if several:
                    query_sums += of_part
                    if summed is not None and sum_part is not None:
                        summed[here, part] = sum_part
            if several:
                of_queries.copy_(query_sums)
    else:
        results = grad_query, grad_keys, summed
        hopper.gradients_of_rows(inputs, results, indices, lengths, range(rows), softmax_scale, False)
    grad_keys.copy_(hopper.in_order(grad_keys))


def rows_per_launch(topk: int, heads: int, dim: int, workspace: int) -> int:
    """Return of how many rows a workspace of some bytes holds the gradients, at least 1.

    The workspace holds a gradient per entry of a launch. If a row passes in parts, each head has two more
    gradients in it: that of the part and the sum over parts.
    """
    gradients = topk if topk <= ROW_ENTRIES else ROW_ENTRIES + 2 * heads
    return max(1, workspace // (4 * dim * gradients))


def _backward_by_tiles(
    call: AttentionCall,
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor, Tensor | None],
    topk_indices: Tensor,
    lengths: Tensor,
    deterministic: bool,
) -> None:
    """Compute key and score gradients per chunk of rows, then query gradients from score gradients."""
    query, key_value, grad_out, lse, delta = inputs
    grad_query, grad_key_value, summed = results
    softmax_scale, value_dim = call.softmax_scale, call.value_dim
    (batch, rows, heads, dim), topk = query.shape, topk_indices.shape[2]
    key_length, device = key_value.shape[1], query.device
    all_indices = topk_indices.view(batch * rows, topk)  # [batch * rows, topk]
    constants = dim_blocks(value_dim, dim) | {"WIDEN": widen(query)}
    key_tiles = _backward_keys_tiles(query, heads)
    query_tiles = _backward_query_tiles(query, heads, value_dim)
    on_hopper = hopper.takes_backward(query, key_value, grad_out, value_dim, topk)
    # Padded number and grouping of the heads in grad_scores, see `backward_query_kernel`.
    stored, groups = heads, 1
    if on_hopper:
        block_heads = hopper.backward_heads(heads)
        stored, groups = triton.cdiv(heads, block_heads) * block_heads, block_heads // 8
    row_bytes = topk * (stored * query.element_size() + (4 * dim if deterministic else 0))
    workspace = tile_bytes(grad_key_value) if deterministic else WORKSPACE_BYTES
    chunk = max(1, min(batch * rows, workspace // row_bytes))
    if on_hopper and chunk < batch * rows:
        chunk = whole_chunk(chunk)
    grad_scores = torch.empty(chunk, topk, stored, dtype=query.dtype, device=device)
    gathered = torch.empty(chunk, topk, dim, device=device) if deterministic else None
    target = grad_key_value if gathered is None else gathered
    # Chunks are reordered together, as many as a memory bound allows. Per entry, a sort takes up to 32 bytes
    # and shared tiles take 10: 42 in total. Memory of the previous chunks is released after it is replaced.
    order_bytes = WORKSPACE_BYTES // 42 if deterministic else WORKSPACE_BYTES // 8 // 10
    ordered_rows = max(1, order_bytes // (chunk * topk)) * chunk
    for first in range(0, batch * rows, chunk):
        count = min(chunk, batch * rows - first)
        if first % ordered_rows == 0:
            ahead = slice(first, first + ordered_rows)
            indices = all_indices[ahead]
            if on_hopper:
                shared = share_tiles(indices, lengths[ahead], first, rows, key_length, chunk)
                tasks, bounds = tasks_of(shared.ends, lengths[ahead], topk, chunk)
                indices = shared.indices
            if deterministic:
                ids = key_ids(indices, first, rows, key_length, batch * key_length)
                if on_hopper:
                    # Entries whose gradient is part of an earlier row's sum count as no key.
                    ids.masked_fill_(added_by_others(shared.ends, topk), batch * key_length)
                order = order_by_key(ids, batch * key_length, chunk)
        part = first % ordered_rows // chunk
        of_chunk = slice(part * chunk, part * chunk + count)
        if on_hopper:
            hopper.gradients_of_keys(
                inputs,
                (grad_scores, summed, target),
                (indices[of_chunk], shared.places[of_chunk], tasks, bounds[part]),
                *(first, softmax_scale, not deterministic),
            )
        else:
            on_grid(backward_keys_kernel, count * triton.cdiv(topk, key_tiles["BLOCK_N"]))(
                *(query, key_value, topk_indices, lengths, grad_out, lse, delta),
                *(grad_scores, lse if summed is None else summed, target),
                *(first, rows, key_length, heads, topk),
                *(*query.stride()[:3], *key_value.stride()[:2], *grad_out.stride()[:3]),
                *(softmax_scale, softmax_scale * LOG2E),
                WITH_SUM=summed is not None,
                ATOMIC=gathered is None,
                ALIGNED=aligned(query) and aligned(grad_out),
                **constants,
                **key_tiles,
            )
        head_blocks = triton.cdiv(stored, query_tiles["BLOCK_H"])
        on_grid(backward_query_kernel, count * head_blocks * query_tiles["PARTS"])(
            *(key_value, indices[of_chunk], lengths, grad_scores, grad_query, first),
            *(rows, key_length, heads, stored, topk, *key_value.stride()[:2]),
            GROUPS=groups,
            **constants,
            **query_tiles,
        )
        if gathered is not None:
            add_ordered_rows(grad_key_value, gathered[:count], order, part)


def _operands(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, keys and indices in the layout that the kernels require."""
    return dense_rows(call.query), dense_rows(call.key_value), packed_indices(call.topk_indices)


def _delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return delta, the dot product of output and output gradient, ``[batch, rows, heads]`` fp32."""
    batch, rows, heads, value_dim = out.shape
    delta = torch.empty(batch, rows, heads, dtype=torch.float32, device=out.device)
    on_grid(delta_kernel, batch * rows * triton.cdiv(heads, 16))(
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


def _forward_tiles(query: Tensor, heads: int) -> dict[str, Any]:
    """Return the tile sizes. A program keeps a BLOCK_H x 512 output in registers: 64 heads fill 8 warps."""
    memory = shared_memory(query.device)
    if query.dtype == torch.float32:
        return _tiles(16, 16, 8, 2 if memory > SMALL else 1)
    if heads <= 16:
        return _tiles(16, 32, 4, 3)
    if heads <= 32 or memory == SMALL:
        return _tiles(32, 32, 8, 3) if memory < LARGE else _tiles(32, 32, 4, 3)
    return _tiles(64, 32 if memory < LARGE or on_blackwell(query.device) else 64, 8, 3)


def _sum_tiles(query: Tensor, heads: int) -> dict[str, Any]:
    memory = shared_memory(query.device)
    if query.dtype == torch.float32:
        return _tiles(16, 16, 8, 2 if memory > SMALL else 1)
    if memory < LARGE:
        # At most half of the shared memory, so that a second program runs while this one waits for memory.
        return _tiles(16, 32, 4, 2)
    return _tiles(min(block(heads), 32), 64, 4, 3)


def _backward_keys_tiles(query: Tensor, heads: int) -> dict[str, Any]:
    """Return the tile sizes. A program keeps a BLOCK_N x 576 gradient in registers, looping over heads."""
    memory = shared_memory(query.device)
    if query.dtype == torch.float32:  # queries and output gradients are 2 x BLOCK_H rows of shared memory
        # One head leaves half of 16 rows empty, and heads of 256 + 256 numbers would spill 1.7 KB per thread.
        return _tiles(16 if memory > SMALL and heads > 8 else 8, 16, 8, 1)
    if memory < LARGE:
        # Products of single warps keep more in registers: with 64 keys a thread would spill 5 KB.
        return _tiles(16, 32, 8, 2)
    return _tiles(16 if on_blackwell(query.device) else min(block(heads), 32), 64, 8, 2)


def _backward_query_tiles(query: Tensor, heads: int, value_dim: int) -> dict[str, Any]:
    """Return the tile sizes: the forward's, or special ones for warp group products.

    Without warp groups a block has at most 32 heads, because products of single warps need more registers.
    With warp groups, key tiles are small and many loads are in flight. With 128 heads each program computes
    half of the columns, so that keys are gathered once.
    """
    if shared_memory(query.device) < LARGE:
        return _forward_tiles(query, min(heads, 32)) | {"PARTS": 1}
    if query.dtype == torch.float32 or heads <= 32 or on_blackwell(query.device):
        return _forward_tiles(query, heads) | {"PARTS": 1}
    if heads > 64 and value_dim % 32 == 0 and (query.shape[3] - value_dim) % 32 == 0:
        return _tiles(128, 32, 8, 6) | {"PARTS": 2}
    return _tiles(64, 32, 8, 5) | {"PARTS": 1}


def _tiles(heads: int, keys: int, warps: int, stages: int) -> dict[str, Any]:
    return {"BLOCK_H": heads, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages}
