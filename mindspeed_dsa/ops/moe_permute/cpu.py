"""Permutation of tokens by expert on CPUs: every row is read once and written once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.moe_permute.row_map import Permutation, RowMap, of_routing, unpack

KIND: Literal["gradients"] = "gradients"
# Sums of a block of tokens stay in the cache until the addend meets them.
_BLOCK_BYTES = 256 << 10


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
    return None if shape.device == "cpu" else "it runs on CPU tensors only"


def plan_permute(tokens: Tensor, probs: Tensor | None, topk: int | None) -> Any:
    """None: it takes every call."""


def plan_unpermute(row_map: Tensor, rows: int, probs: Tensor | None) -> Any:
    """None: it takes every call."""


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, rows: int | None, topk: int | None
) -> Permutation:
    """Rows expert by expert."""
    found = of_routing(routing_map, rows)
    permuted_probs = None
    if probs is not None:
        permuted_probs = probs.reshape(-1).index_select(0, found.slots(routing_map.shape[1]))
    return tokens.index_select(0, found.tokens), permuted_probs, found.pack()


def permute_gradients(
    grad_permuted: Tensor | None, grad_probs: Tensor | None, row_map: Tensor, routing_map: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``[tokens, hidden]`` and of the probabilities ``[tokens, experts]``."""
    tokens, experts = routing_map.shape
    either = grad_permuted if grad_permuted is not None else grad_probs
    assert either is not None
    found = unpack(row_map, tokens, len(either))
    grad_tokens = None if grad_permuted is None else _add_up(grad_permuted, found, tokens, None, None)
    return grad_tokens, None if grad_probs is None else _dense(grad_probs, found, tokens, experts)


def unpermute(
    permuted: Tensor, row_map: Tensor, tokens: int, probs: Tensor | None, addend: Tensor | None
) -> Tensor:
    """Each token's rows, weighted and added up: ``[tokens, hidden]``."""
    return _add_up(permuted, unpack(row_map, tokens, len(permuted)), tokens, probs, addend)


def unpermute_gradients(
    grad: Tensor, row_map: Tensor, rows: int, permuted: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the permuted rows, and of the probabilities where there are some."""
    tokens, hidden = grad.shape
    found = unpack(row_map, tokens, rows)
    if probs is None or permuted is None:
        return grad.index_select(0, found.tokens), None
    wide = torch.promote_types(torch.promote_types(grad.dtype, probs.dtype), torch.float32)
    weights = probs.reshape(-1).index_select(0, found.slots(probs.shape[1])).to(wide)
    grad_permuted = torch.empty_like(permuted)
    grad_weights = torch.empty(rows, dtype=wide)
    for first, last in _blocks(rows, hidden, wide):
        part = grad.index_select(0, found.tokens[first:last]).to(wide)
        torch.linalg.vecdot(part, permuted[first:last].to(wide), out=grad_weights[first:last])
        torch.mul(part, weights[first:last, None], out=grad_permuted[first:last])
    return grad_permuted, _dense(grad_weights.to(probs.dtype), found, tokens, probs.shape[1])


def sort_chunks(tensors: Sequence[Tensor], split_sizes: Tensor, order: Tensor) -> tuple[Tensor, ...]:
    """Chunks of rows in another order, the same for each tensor."""
    sizes, places = split_sizes.tolist(), order.tolist()
    return tuple(_in_order(tensor.split(sizes), places) for tensor in tensors)


def _in_order(chunks: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    return torch.cat([chunks[place] for place in places])


def _dense(by_row: Tensor, found: RowMap, tokens: int, experts: int) -> Tensor:
    """``[tokens, experts]`` with the values of rows ``[rows]``, and zeros."""
    dense = by_row.new_zeros(tokens * experts)
    return dense.index_copy_(0, found.slots(experts).long(), by_row).view(tokens, experts)


def _add_up(
    source: Tensor, found: RowMap, tokens: int, probs: Tensor | None, addend: Tensor | None
) -> Tensor:
    """Sums of each token's rows, in ascending order of rows, in fp32 where rows have 16 bits.

    Args:
        source: ``[rows, hidden]``.
        found: the row map.
        tokens: rows of the result.
        probs: ``[tokens, experts]``, weights of the rows, or None.
        addend: ``[tokens, hidden]``, added to the sum, or None.

    Returns:
        ``[tokens, hidden]`` in the dtype of ``source``.
    """
    source, offsets = source.contiguous(), found.starts(tokens)
    weights = None
    if probs is not None:
        weights = probs.reshape(-1).index_select(0, found.slots(probs.shape[1]).index_select(0, found.rows))
    mixed = weights is not None and weights.dtype != source.dtype
    if addend is None and not mixed:
        return _sums(source, found.rows, offsets, weights)
    total = source.new_empty(tokens, source.shape[1])
    for first, last in _blocks(tokens, source.shape[1], source.dtype):
        begin, end = offsets[first].item(), offsets[last].item()
        rows, bounds = found.rows[begin:end], offsets[first : last + 1] - begin
        if weights is None or not mixed:
            part = _sums(source, rows, bounds, None if weights is None else weights[begin:end])
        else:
            weighted = source.index_select(0, rows) * weights[begin:end, None]
            part = _sums(weighted, torch.arange(len(rows), dtype=torch.int32), bounds, None)
        if addend is None:
            total[first:last] = part
        else:
            torch.add(part, addend[first:last], out=total[first:last])
    return total


def _sums(source: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """Sums of listed rows without a copy of them, ``[len(offsets) - 1, hidden]``."""
    return torch.embedding_bag(source, rows, offsets, False, 0, False, weights, True)[0]


def _blocks(rows: int, hidden: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """First and last row, one past it, of blocks that fit into a core's cache."""
    step = max(_BLOCK_BYTES // max(hidden * dtype.itemsize, 1), 1)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)
