"""Backends of the token permutation: plain PyTorch, a version with few passes for CPUs, and torch_npu.

The backend for NVIDIA GPUs is ``triton.py``. ``row_map.py`` has the row maps of all backends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import Backend, ShapeClass
from mindspeed_dsa.ops.moe_permute.row_map import (
    Permutation,
    RowMap,
    chunk_rows,
    group_of_rows,
    of_routing,
    unpack,
    unpack_for,
)
from mindspeed_dsa.ops.npu.device import npu_op, unavailable
from mindspeed_dsa.ops.precision import wide
from mindspeed_dsa.platforms.host_pool import upload

# Bytes of a block of sums on a CPU, so that it is still in the cache when the addend is added.
_BLOCK_BYTES = 256 << 10
# Bytes of a block on an NPU: bounds the memory of its widened copy, and the number of launches.
_NPU_BLOCK_BYTES = 256 << 20
_NPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_EXPERTS_OF_A_TOKEN = 512
# The device passes indices through fp32, which is exact up to 2^24.
_MOST = 16_777_215
_PERMUTE = "npu_moe_token_permute_with_routing_map"
_PERMUTE_GRAD = "npu_moe_token_permute_with_routing_map_grad"
_FINALIZE = "npu_moe_finalize_routing"


class _Permuter(Backend, Protocol):
    def plan_permute(self, tokens: Tensor, probs: Tensor | None, topk: int | None, /) -> Any:
        """Return why the backend cannot take a call, or None: see :func:`mindspeed_dsa.ops.backend.plan`."""
        return None

    def plan_unpermute(self, row_map: Tensor, rows: int, probs: Tensor | None, /) -> Any:
        """Return why the backend cannot take a call, or None: see :func:`mindspeed_dsa.ops.backend.plan`."""
        return None

    @abstractmethod
    def permute(
        self,
        tokens: Tensor,
        routing_map: Tensor,
        probs: Tensor | None,
        rows: int | None,
        topk: int | None,
        /,
    ) -> Permutation:
        """Return the rows grouped by expert."""

    @abstractmethod
    def unpermute(
        self,
        permuted: Tensor,
        row_map: Tensor,
        tokens: int,
        probs: Tensor | None,
        addend: Tensor | None,
        /,
    ) -> Tensor:
        """Return the weighted sum of each token's rows: ``[tokens, hidden]``."""

    @abstractmethod
    def sort_chunks(
        self, tensors: Sequence[Tensor], split_sizes: Tensor, order: Tensor, /
    ) -> tuple[Tensor, ...]:
        """Reorder chunks of rows, in the same way for each tensor."""


class AutogradPermuter(_Permuter, Protocol):
    """Backend without its own backward: autograd differentiates its functions."""

    KIND: Literal["autograd"]


class GradientPermuter(_Permuter, Protocol):
    """Backend with its own backward.

    The backward of ``sort_chunks`` is ``sort_chunks`` with the inverse order.
    """

    KIND: Literal["gradients"]

    @abstractmethod
    def permute_gradients(
        self, grad_permuted: Tensor | None, grad_probs: Tensor | None, row_map: Tensor, routing_map: Tensor, /
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the tokens, ``[tokens, hidden]``, and probabilities, ``[tokens, experts]``.

        None means a zero gradient, for arguments and results; at least one argument is not None.
        """

    @abstractmethod
    def unpermute_gradients(
        self, grad: Tensor, row_map: Tensor, rows: int, permuted: Tensor | None, probs: Tensor | None, /
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the permuted rows, and of ``probs`` if it is not None."""


Permuter = AutogradPermuter | GradientPermuter


class _Plain(_Permuter, Protocol):
    """Base class of backends that permute with PyTorch's gathers."""

    def permute(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor | None, rows: int | None, topk: int | None
    ) -> Permutation:
        mapping = of_routing(routing_map, rows)
        permuted_probs = None
        if probs is not None:
            permuted_probs = probs.reshape(-1).index_select(0, mapping.slots(routing_map.shape[1]))  # [rows]
        return tokens.index_select(0, mapping.tokens), permuted_probs, mapping.pack()

    def sort_chunks(
        self, tensors: Sequence[Tensor], split_sizes: Tensor, order: Tensor
    ) -> tuple[Tensor, ...]:
        sizes, places = split_sizes.tolist(), order.tolist()
        return tuple(_in_order(tensor.split(sizes), places) for tensor in tensors)


def _in_order(chunks: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    return torch.cat([chunks[place] for place in places])  # [rows, ...]


class Reference(_Plain, AutogradPermuter):
    """Backend that gathers rows and sums them by index in plain PyTorch, with backward by autograd."""

    KIND: Literal["autograd"] = "autograd"

    def unpermute(
        self, permuted: Tensor, row_map: Tensor, tokens: int, probs: Tensor | None, addend: Tensor | None
    ) -> Tensor:
        mapping = unpack(row_map, tokens, len(permuted))
        total = permuted.to(wide(permuted.dtype))
        if probs is not None:
            weights = probs.reshape(-1).index_select(0, mapping.slots(probs.shape[1]))  # [rows]
            total = total * weights.to(total.dtype)[:, None]
        # [tokens, hidden]
        total = total.new_zeros(tokens, total.shape[1]).index_add(0, mapping.tokens, total)
        if addend is not None:
            total = total + addend
        return total.to(permuted.dtype)


class Cpu(_Plain, GradientPermuter):
    """Backend with PyTorch gathers and sums that read and write every row only once."""

    KIND: Literal["gradients"] = "gradients"

    def unsupported(self, shape: ShapeClass) -> str | None:
        return None if shape.device == "cpu" else "it runs on CPU tensors only"

    def permute_gradients(
        self, grad_permuted: Tensor | None, grad_probs: Tensor | None, row_map: Tensor, routing_map: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        tokens, experts = routing_map.shape
        mapping = unpack_for(row_map, routing_map, grad_permuted, grad_probs)
        grad_tokens = None if grad_permuted is None else _add_up(grad_permuted, mapping, tokens, None, None)
        return grad_tokens, None if grad_probs is None else _dense(grad_probs, mapping, tokens, experts)

    def unpermute(
        self, permuted: Tensor, row_map: Tensor, tokens: int, probs: Tensor | None, addend: Tensor | None
    ) -> Tensor:
        return _add_up(permuted, unpack(row_map, tokens, len(permuted)), tokens, probs, addend)

    def unpermute_gradients(
        self, grad: Tensor, row_map: Tensor, rows: int, permuted: Tensor | None, probs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return _unpermute_gradients(grad, unpack(row_map, len(grad), rows), permuted, probs, _BLOCK_BYTES)


def _unpermute_gradients(
    grad: Tensor, found: RowMap, permuted: Tensor | None, probs: Tensor | None, block_bytes: int
) -> tuple[Tensor, Tensor | None]:
    """Compute ``unpermute_gradients`` in blocks of rows of ``block_bytes``."""
    if probs is None or permuted is None:
        return grad.index_select(0, found.tokens), None  # [rows, hidden]
    (tokens, experts), (rows, hidden) = probs.shape, permuted.shape
    dtype = wide(torch.promote_types(grad.dtype, probs.dtype))
    weights = probs.reshape(-1).index_select(0, found.slots(experts)).to(dtype)  # [rows]
    grad_permuted = torch.empty_like(permuted, memory_format=torch.contiguous_format)  # [rows, hidden]
    grad_weights = torch.empty(rows, dtype=dtype, device=grad.device)
    for first, last in _blocks(rows, hidden, dtype, block_bytes):
        part = grad.index_select(0, found.tokens[first:last]).to(dtype)  # [block rows, hidden]
        torch.linalg.vecdot(part, permuted[first:last].to(dtype), out=grad_weights[first:last])
        torch.mul(part, weights[first:last, None], out=grad_permuted[first:last])
    return grad_permuted, _dense(grad_weights.to(probs.dtype), found, tokens, experts)


def _dense(by_row: Tensor, found: RowMap, tokens: int, experts: int) -> Tensor:
    """Scatter ``[rows]`` values to zeros ``[tokens, experts]``."""
    dense = by_row.new_zeros(tokens * experts)
    return dense.index_copy_(0, found.slots(experts).long(), by_row).view(tokens, experts)


def _add_up(
    source: Tensor, found: RowMap, tokens: int, probs: Tensor | None, addend: Tensor | None
) -> Tensor:
    """Return the sums of each token's rows, in ascending order of rows, in fp32 for 16-bit rows.

    Args:
        source: ``[rows, hidden]``.
        found: row map of the permutation.
        tokens: number of tokens, rows of the result.
        probs: ``[tokens, experts]``, weights of the rows, or None.
        addend: ``[tokens, hidden]``, added to the sum, or None.

    Returns:
        ``[tokens, hidden]`` in the dtype of ``source``.
    """
    source, offsets = source.contiguous(), found.starts(tokens)
    weights = None
    if probs is not None:
        # [rows], token by token
        weights = probs.reshape(-1).index_select(0, found.slots(probs.shape[1]).index_select(0, found.rows))
    # embedding_bag takes weights only in the dtype of the rows.
    mixed = weights is not None and weights.dtype != source.dtype
    if addend is None and not mixed:
        return _sums(source, found.rows, offsets, weights)
    total = source.new_empty(tokens, source.shape[1])  # [tokens, hidden]
    for first, last in _blocks(tokens, source.shape[1], source.dtype):
        begin, end = offsets[first].item(), offsets[last].item()
        rows, bounds = found.rows[begin:end], offsets[first : last + 1] - begin
        if weights is None or not mixed:
            part = _sums(source, rows, bounds, None if weights is None else weights[begin:end])
        else:
            weighted = source.index_select(0, rows) * weights[begin:end, None]  # [block rows, hidden]
            part = _sums(weighted, torch.arange(len(rows), dtype=torch.int32), bounds, None)
        if addend is None:
            total[first:last] = part
        else:
            torch.add(part, addend[first:last], out=total[first:last])
    return total


def _sums(source: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sums of listed rows, ``[len(offsets) - 1, hidden]``, without a copy of the rows."""
    return torch.embedding_bag(source, rows, offsets, False, 0, False, weights, True)[0]


def _blocks(
    rows: int, hidden: int, dtype: torch.dtype, block_bytes: int = _BLOCK_BYTES
) -> Iterator[tuple[int, int]]:
    """Yield the bounds of blocks of rows of ``block_bytes``; by default they fit a core's cache."""
    step = max(block_bytes // max(hidden * dtype.itemsize, 1), 1)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


class Npu(GradientPermuter):
    """Backend that calls torch_npu's operators, which need the same number of experts for every token.

    Each token then owns ``topk`` rows, and the operators' ``sorted_indices [tokens * topk]`` is
    :attr:`RowMap.rows`.
    """

    KIND: Literal["gradients"] = "gradients"

    def unsupported(self, shape: ShapeClass) -> str | None:
        if shape.dtype not in _NPU_DTYPES:
            return "torch_npu's operators take fp32, bf16 and fp16"
        return unavailable(shape.device, _PERMUTE, _PERMUTE_GRAD, _FINALIZE)

    def plan_permute(self, tokens: Tensor, probs: Tensor | None, topk: int | None) -> Any:
        if topk is None:
            return "its operators need every token to go to equally many experts"
        if not 1 <= topk < _MOST_EXPERTS_OF_A_TOKEN:
            return f"{_PERMUTE} takes 1 to {_MOST_EXPERTS_OF_A_TOKEN - 1} experts for a token"
        if len(tokens) * topk >= _MOST:
            return f"{_PERMUTE} takes fewer than {_MOST} rows"
        return None

    def plan_unpermute(self, row_map: Tensor, rows: int, probs: Tensor | None) -> Any:
        if len(row_map) != 3 * rows:
            return "its operators need every token to have equally many rows"
        if probs is not None and probs.dtype not in _NPU_DTYPES:
            return f"{_FINALIZE} takes weights in fp32, bf16 and fp16"
        return None

    def permute(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor | None, rows: int | None, topk: int | None
    ) -> Permutation:
        assert topk is not None
        # The operator takes probabilities in the tokens' dtype, which would round a router's fp32
        # probabilities.
        alike = probs is not None and probs.dtype == tokens.dtype
        permuted, permuted_probs, listed = npu_op(_PERMUTE)(
            tokens,
            routing_map,
            probs=probs if alike else None,
            num_out_tokens=len(tokens) * topk,
            drop_and_pad=False,
        )
        mapping = _row_map(listed, routing_map, topk)
        if probs is not None and not alike:
            permuted_probs = probs.reshape(-1).index_select(0, mapping.slots(probs.shape[1]))  # [rows]
        return permuted, permuted_probs if probs is not None else None, mapping.pack()

    def permute_gradients(
        self, grad_permuted: Tensor | None, grad_probs: Tensor | None, row_map: Tensor, routing_map: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        tokens, experts = routing_map.shape
        mapping = unpack_for(row_map, routing_map, grad_permuted, grad_probs)
        alike = (
            grad_permuted is not None and grad_probs is not None and grad_probs.dtype == grad_permuted.dtype
        )
        grad_tokens = dense = None
        if grad_permuted is not None:
            grad_tokens, dense = npu_op(_PERMUTE_GRAD)(
                grad_permuted,
                grad_probs if alike else None,
                mapping.rows,
                routing_map,
                experts,
                tokens,
                False,
            )
        if grad_probs is None:
            return grad_tokens, None
        if not alike:
            dense = grad_probs.new_zeros(tokens * experts)
            # [tokens * experts] -> [tokens, experts]
            dense = dense.index_copy_(0, mapping.slots(experts).long(), grad_probs).view(tokens, experts)
        return grad_tokens, dense

    def unpermute(
        self, permuted: Tensor, row_map: Tensor, tokens: int, probs: Tensor | None, addend: Tensor | None
    ) -> Tensor:
        topk = len(permuted) // tokens
        mapping = unpack(row_map, tokens, len(permuted))
        # The operator takes the first row of every token, then the second row of every token, and so on.
        by_choice = mapping.rows.view(tokens, topk).t().reshape(-1)  # [topk * tokens]
        # The operator infers the number of rows per token from the scales. Only some releases have a
        # parameter for it, which requires a CANN newer than most that they run with.
        dtype = permuted.dtype
        if probs is None:
            scales = permuted.new_ones(tokens, topk)
        else:
            # The operator takes one dtype, and would round a router's fp32 weights to the rows' dtype.
            dtype = torch.promote_types(dtype, probs.dtype)
            slots = mapping.slots(probs.shape[1]).index_select(0, mapping.rows)  # [tokens * topk]
            # [tokens, topk]
            scales = probs.reshape(-1).index_select(0, slots).view(tokens, topk).to(dtype)
        addend = None if addend is None else addend.to(dtype)
        total: Tensor = npu_op(_FINALIZE)(permuted.to(dtype), addend, None, None, scales, by_choice, None)
        return total.to(permuted.dtype)

    def unpermute_gradients(
        self, grad: Tensor, row_map: Tensor, rows: int, permuted: Tensor | None, probs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        mapping = unpack(row_map, len(grad), rows)
        return _unpermute_gradients(grad, mapping, permuted, probs, _NPU_BLOCK_BYTES)

    def sort_chunks(
        self, tensors: Sequence[Tensor], split_sizes: Tensor, order: Tensor
    ) -> tuple[Tensor, ...]:
        device = tensors[0].device
        before = chunk_rows(upload(split_sizes, device), upload(order, device), len(tensors[0]))
        return tuple(tensor.index_select(0, before) for tensor in tensors)


def _row_map(listed: Tensor, routing_map: Tensor, topk: int) -> RowMap:
    """Return the row map for the operator's ``sorted_indices``, without a device synchronization."""
    rows = len(listed)
    token = torch.arange(rows // topk, dtype=torch.int32, device=listed.device)
    by_place = token[:, None].expand(-1, topk).reshape(-1)  # [tokens * topk]
    tokens = torch.empty_like(listed).index_copy_(0, listed.long(), by_place)  # [rows]
    counts = routing_map.sum(0, dtype=torch.int32)
    return RowMap(None, listed, tokens, group_of_rows(counts, rows))
