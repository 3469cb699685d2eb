"""Permutation of tokens by expert in Triton, for CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import triton
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass, takes_every_call
from mindspeed_dsa.ops.moe_permute.row_map import Permutation, RowMap, chunk_rows, unpack, unpack_for
from mindspeed_dsa.ops.moe_permute.triton_kernels import (
    add_up_kernel,
    gather_kernel,
    list_rows_kernel,
    scatter_probs_kernel,
    weighted_gather_kernel,
)
from mindspeed_dsa.ops.triton.common import unsupported_here
from mindspeed_dsa.ops.triton.launch import on_grid
from mindspeed_dsa.platforms.host_pool import upload

KIND: Literal["gradients"] = "gradients"
# Columns that a program processes at a time.
_MAX_BLOCK = 2048


def unsupported(shape: ShapeClass) -> str | None:
    """Return why this backend cannot take calls of this shape, or None."""
    return unsupported_here(shape)


plan_permute = plan_unpermute = takes_every_call


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, rows: int | None, topk: int | None
) -> Permutation:
    """Return the rows grouped by expert."""
    if rows is None:
        rows = int(routing_map.sum())
    row_map = _list_rows(routing_map, rows)
    permuted = tokens.new_empty(rows, tokens.shape[1])  # [rows, hidden]
    permuted_probs = None if probs is None else probs.new_empty(rows)
    _gather(tokens, row_map, permuted, probs, permuted_probs)
    return permuted, permuted_probs, row_map.pack()


def permute_gradients(
    grad_permuted: Tensor | None, grad_probs: Tensor | None, row_map: Tensor, routing_map: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of ``[tokens, hidden]`` tokens and ``[tokens, experts]`` probabilities."""
    tokens, experts = routing_map.shape
    mapping = unpack_for(row_map, routing_map, grad_permuted, grad_probs)
    grad_tokens = None if grad_permuted is None else _add_up(grad_permuted, mapping, tokens, None, None)
    if grad_probs is None:
        return grad_tokens, None
    dense, rows = grad_probs.new_zeros(tokens, experts), len(grad_probs)
    if rows:
        on_grid(scatter_probs_kernel, triton.cdiv(rows, 1024))(
            grad_probs.contiguous(), mapping.tokens, mapping.experts, dense, rows, experts, BLOCK=1024
        )
    return grad_tokens, dense


def unpermute(
    permuted: Tensor, row_map: Tensor, tokens: int, probs: Tensor | None, addend: Tensor | None
) -> Tensor:
    """Return the weighted sum of each token's rows: ``[tokens, hidden]``."""
    return _add_up(permuted, unpack(row_map, tokens, len(permuted)), tokens, probs, addend)


def unpermute_gradients(
    grad: Tensor, row_map: Tensor, rows: int, permuted: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the permuted rows, and of ``probs`` if it is not None."""
    tokens, hidden = grad.shape
    mapping = unpack(row_map, tokens, rows)
    out = grad.new_empty(rows, hidden)
    if probs is None or permuted is None:
        _gather(grad, mapping, out, None, None)
        return out, None
    grad_probs = torch.zeros_like(probs, memory_format=torch.contiguous_format)  # [tokens, experts]
    on_grid(weighted_gather_kernel, rows)(
        grad.contiguous(),
        permuted.contiguous(),
        mapping.tokens,
        mapping.experts,
        probs.contiguous(),
        out,
        grad_probs,
        hidden,
        probs.shape[1],
        BLOCK=_block(hidden),
    )
    return out, grad_probs


def sort_chunks(tensors: Sequence[Tensor], split_sizes: Tensor, order: Tensor) -> tuple[Tensor, ...]:
    """Reorder chunks of rows, in the same way for each tensor."""
    device, rows = tensors[0].device, len(tensors[0])
    before = chunk_rows(upload(split_sizes, device), upload(order, device), rows).int()
    moved = []
    for tensor in tensors:
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        # [rows, ...] -> [rows, hidden]
        wide = tensor.view(rows, -1) if tensor.is_contiguous() else tensor.reshape(rows, -1)
        _gather(wide, RowMap(None, before, before, before), out.view(rows, -1), None, None)
        moved.append(out)
    return tuple(moved)


def _block(hidden: int) -> int:
    return min(triton.next_power_of_2(hidden), _MAX_BLOCK)


def _list_rows(routing_map: Tensor, rows: int) -> RowMap:
    """Return the row map, without a device synchronization."""
    tokens, experts = routing_map.shape
    device = routing_map.device
    # Rows are numbered by expert, then by token: [experts * tokens].
    rank = routing_map.t().reshape(-1).cumsum(0, dtype=torch.int32)
    offsets = torch.zeros(tokens + 1, dtype=torch.int32, device=device)
    torch.cumsum(routing_map.sum(1, dtype=torch.int32), 0, dtype=torch.int32, out=offsets[1:])
    # If `rows` is wrong, rows beyond the map's entries have no token (-1), and offsets are clamped to `rows`.
    parts = torch.full((3, rows), -1, dtype=torch.int32, device=device)
    on_grid(list_rows_kernel, tokens)(
        routing_map.contiguous().view(torch.int8),
        rank,
        offsets,
        *parts,
        tokens,
        experts,
        rows,
        BLOCK=min(triton.next_power_of_2(experts), 512),
    )
    return RowMap(offsets.clamp_(max=rows), *parts.unbind(0))


def _gather(
    source: Tensor, found: RowMap, out: Tensor, probs: Tensor | None, out_probs: Tensor | None
) -> None:
    """Copy each row's token to ``out [rows, hidden]`` and its probability to ``out_probs [rows]``."""
    rows, hidden = out.shape
    if rows == 0:
        return
    on_grid(gather_kernel, rows)(
        source.contiguous(),
        found.tokens,
        found.experts,
        None if probs is None else probs.contiguous(),
        out,
        out_probs,
        hidden,
        0 if probs is None else probs.shape[1],
        HAS_PROBS=probs is not None,
        BLOCK=_block(hidden),
    )


def _add_up(
    source: Tensor, found: RowMap, tokens: int, probs: Tensor | None, addend: Tensor | None
) -> Tensor:
    """Return, for each token, the sum of its permuted rows plus ``addend``: ``[tokens, hidden]``."""
    hidden = source.shape[1]
    total = source.new_empty(tokens, hidden)
    block = _block(hidden)
    on_grid(add_up_kernel, tokens, triton.cdiv(hidden, block))(
        source.contiguous(),
        found.starts(tokens),
        found.rows,
        found.experts,
        None if probs is None else probs.contiguous(),
        None if addend is None else addend.contiguous(),
        total,
        hidden,
        0 if probs is None else probs.shape[1],
        HAS_PROBS=probs is not None,
        HAS_ADDEND=addend is not None,
        BLOCK=block,
    )
    return total
