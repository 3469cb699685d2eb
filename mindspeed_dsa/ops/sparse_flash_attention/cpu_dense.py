"""Sparse flash attention on CPU where keys are few: rows times all keys around those that they selected.

Gathering the selected keys of every row takes time however few heads use them, and leaves small products.
Where a sequence is only some times as long as the selection, less time goes into products of a chunk of rows
with every key from the first to the last that any of them selected, the others being masked: the work is
more, but it is a handful of large products.

How often a row selected a key, its count, does the masking. A key that is listed twice counts twice, as it
does where keys are gathered.

What is masked is multiplied with zero, which hides numbers only: infinity or NaN in a key that no row
selected would spread. With such operands keys are gathered, see :func:`takes`. That everything is finite also
avoids what costs up to twenty times the time: ``masked_fill_`` with one mask for all heads, and MKL's ``exp``
and ``log`` where the result is 0 or -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from mindspeed_dsa.ops.cpu_blocks import Scratch, compute_dtype, linear, one_by_one, sum_in_order
from mindspeed_dsa.ops.cpu_threads import share_out, worker_count
from mindspeed_dsa.ops.indices import names_key

Result = TypeVar("Result")

# Bytes that the scores of a chunk may take, per thread: two such tensors share the cache with keys and rows.
_CHUNK_BYTES = 1 << 19
# With causal rows, the fewer there are in a chunk the fewer keys it multiplies with.
_MOST_ROWS = 128
# Widths are rounded up to this, so that the number of distinct product shapes stays small.
_WIDTH_STEP = 64
# What is taken from masked scores. The others stay far below, and sums of a few products finite.
_HIDES = torch.finfo(torch.float32).max
_LARGEST_PRODUCT = 1e37


def takes(
    query: Tensor, key_value: Tensor, topk_indices: Tensor, softmax_scale: float, *others: Tensor
) -> bool:
    """Whether this form is right for a call, and faster than gathering keys.

    Args:
        query: ``[batch, query_length, heads, dim]``.
        key_value: ``[batch, key_length, dim]``.
        topk_indices: ``[batch, query_length, topk]``.
        softmax_scale: factor of the scores.
        others: what else is multiplied with keys.
    """
    if key_value.shape[1] > _most_keys(query.shape[2], topk_indices.shape[2]):
        return False
    # No scalar product is larger than the lengths multiplied, and no row is longer than all of its tensor.
    lengths = [
        float(torch.linalg.vector_norm(tensor.detach(), dtype=compute_dtype(tensor.dtype)))
        for tensor in (query, key_value, *others)
    ]
    # NaN is not less than anything.
    return math.prod(1 + length for length in lengths) * (1 + abs(softmax_scale)) < _LARGEST_PRODUCT


def _most_keys(heads: int, topk: int) -> float:
    """Up to how many keys this form is the faster one, forward and backward together.

    Measured with causal rows on one thread, as a multiple of ``topk``: 12 with 4 heads, 4 with 16 and nearly
    2 with 128. With one head more than 11, the most that was tried.
    """
    return topk * min(12.0, 1.5 + 42 / heads)


def forward(
    query: Tensor,
    key_value: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    value_dim: int,
    return_attention_sum: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As :func:`mindspeed_dsa.ops.sparse_flash_attention.cpu.forward`."""
    batch, query_length, heads, dim = query.shape
    dtype = compute_dtype(query.dtype)
    out = torch.empty(batch, query_length, heads, value_dim, dtype=query.dtype)
    lse = torch.empty(batch, query_length, heads, dtype=dtype)
    attention_sum = torch.empty(topk_indices.shape, dtype=dtype) if return_attention_sum else None

    def work(chunks: Iterator[_Chunk], scratch: Scratch) -> None:
        for chunk in chunks:
            at = (chunk.batch, chunk.rows)
            counts, duplicates = chunk.counts(scratch)
            rows, width = counts.shape
            q = scratch("query", rows * heads, dim)
            q.view(rows, heads, dim).copy_(query[at])
            scores, probabilities = (
                scratch(name, rows * heads, width) for name in ("scores", "probabilities")
            )
            full = scratch("out", rows * heads, value_dim)
            _multiply(q, chunk.key.t(), scores, softmax_scale)
            by_head = scores.view(rows, heads, width)
            by_head.add_(_log(counts, duplicates, scratch)[:, None])
            torch.softmax(scores, dim=-1, out=probabilities)
            _multiply(probabilities, chunk.key[:, :value_dim], full)
            out[at] = full.view(rows, heads, value_dim)
            # The most probable key has exp(0) / sum: log(sum) needs no second exponential.
            lse[at] = (scores.amax(dim=-1) - probabilities.amax(dim=-1).log_()).view(rows, heads)
            by_head = probabilities.view(rows, heads, width)
            # A row without a key has attended to all of them so far.
            empty = counts.amax(dim=-1) == 0
            if empty.any():
                by_head.masked_fill_(empty[:, None, None], 0)
                out[at].masked_fill_(empty[:, None, None], 0)
                lse[at].masked_fill_(empty[:, None], -torch.inf)
            if attention_sum is not None:
                _sum_heads(chunk, by_head, counts if duplicates else None, attention_sum[at], scratch)

    _over_chunks(key_value, topk_indices, heads, work)
    return out, lse, attention_sum


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
    """As :func:`mindspeed_dsa.ops.sparse_flash_attention.cpu.backward`."""
    heads, dim = query.shape[2:]
    value_dim = out.shape[3]
    dtype = compute_dtype(query.dtype)
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    attention_sum = torch.empty(topk_indices.shape, dtype=dtype) if return_attention_sum else None
    lowest = torch.finfo(dtype).min

    def work(chunks: Iterator[_Chunk], scratch: Scratch) -> Tensor:
        grad_key_value = torch.zeros(key_value.shape, dtype=dtype)
        for chunk in chunks:
            at = (chunk.batch, chunk.rows)
            counts, duplicates = chunk.counts(scratch)
            rows, width = counts.shape
            q, grad = scratch("query", rows * heads, dim), scratch("grad", rows * heads, value_dim)
            q.view(rows, heads, dim).copy_(query[at])
            grad.view(rows, heads, value_dim).copy_(grad_out[at])
            delta = (grad * out[at].view(-1, value_dim)).sum(dim=-1, keepdim=True)
            probabilities, grad_scores = (
                scratch(name, rows * heads, width) for name in ("probabilities", "grad_scores")
            )
            grad_q = scratch("grad_query", rows * heads, dim)
            _multiply(q, chunk.key.t(), probabilities, softmax_scale)
            by_head = probabilities.view(rows, heads, width)
            # Only a masked score is above the logarithm of the sum, which is -inf in a row without a key.
            by_head.sub_(lse[at][..., None].clamp_min(lowest)).clamp_max_(0).exp_().mul_(counts[:, None])
            _multiply(grad, chunk.key[:, :value_dim].t(), grad_scores)
            grad_scores.sub_(delta).mul_(probabilities)
            _multiply(grad_scores, chunk.key, grad_q, softmax_scale)
            grad_query[at] = grad_q.view(rows, heads, dim)
            total = grad_key_value[chunk.batch, chunk.keys]
            _multiply(grad_scores.t(), q, total, softmax_scale, add=True)
            _multiply(probabilities.t(), grad, total[:, :value_dim], add=True)
            if attention_sum is not None:
                _sum_heads(chunk, by_head, counts if duplicates else None, attention_sum[at], scratch)
        return grad_key_value

    grad_key_value = sum_in_order(_over_chunks(key_value, topk_indices, heads, work))
    return grad_query, grad_key_value.to(key_value.dtype), attention_sum


def _log(counts: Tensor, duplicates: bool, scratch: Scratch) -> Tensor:
    """Logarithm of the counts, that of 0 finite and below all scores."""
    log = torch.clamp(counts, max=1, out=scratch("log", *counts.shape))
    log.sub_(1).mul_(_HIDES)
    return log.add_(counts.clamp_min(1).log_()) if duplicates else log


def _sum_heads(
    chunk: _Chunk, probabilities: Tensor, counts: Tensor | None, out: Tensor, scratch: Scratch
) -> None:
    """Sum of the probabilities over heads, from ``[n, heads, width]``, by key, to ``[n, topk]``, by entry.

    ``counts`` are given where a row may have selected a key twice: each entry gets its share.
    """
    summed = scratch("summed", probabilities.shape[0], chunk.width + 1)
    torch.sum(probabilities, dim=1, out=summed[:, :-1])
    if counts is not None:
        summed[:, :-1].div_(counts.clamp_min(1))
    summed[:, -1] = 0
    torch.gather(summed, 1, chunk.columns, out=out)


@dataclass(frozen=True)
class _Chunk:
    """Some rows of one sequence and the range of keys that they selected from."""

    batch: int
    rows: slice
    keys: slice
    key: Tensor
    """``[width, dim]``: the range's keys, contiguous, in the dtype of the products."""
    columns: Tensor
    """``[n, topk]`` int64: which column an entry names; ``width``, one too many, where it names no key."""

    @property
    def width(self) -> int:
        """How many keys."""
        return self.key.shape[0]

    def counts(self, scratch: Scratch) -> tuple[Tensor, bool]:
        """How often a row selected a key, ``[n, width]``, and whether any did more than once."""
        counts = scratch("counts", self.columns.shape[0], self.width + 1).zero_()
        one = torch.ones((), dtype=counts.dtype)
        counts = counts.scatter_add_(1, self.columns, one.expand(self.columns.shape))[:, :-1]
        return counts, bool(counts.amax() > 1)


class _Cut(NamedTuple):
    batch: int
    rows: slice
    low: int
    high: int


def _over_chunks(
    key: Tensor,
    topk_indices: Tensor,
    heads: int,
    work: Callable[[Iterator[_Chunk], Scratch], Result],
) -> list[Result]:
    """Cut the rows of ``topk_indices`` into chunks and hand them to ``work``.

    ``work`` is called once in every thread, with some of the chunks and with scratch of its own. Which
    chunks depends on the shapes, the indices and the number of threads alone.

    Args:
        key: ``[batch, key_length, dim]``.
        topk_indices: ``[batch, query_length, topk]`` int32 or int64, any strides. Entries outside of the keys
            are none.
        heads: scores per row and key.
        work: takes its chunks in order.

    Returns:
        What ``work`` returned in each thread, in a fixed order.
    """
    batch, query_length, _ = topk_indices.shape
    key_length, dtype = key.shape[1], compute_dtype(key.dtype)
    keys = [one.detach().to(dtype).contiguous() for one in key]
    threads = max(torch.get_num_threads() // worker_count(), 1)
    rows = min(max(threads * _CHUNK_BYTES // (heads * key_length * dtype.itemsize), 1), threads * _MOST_ROWS)
    valid = names_key(topk_indices, key_length)
    lows = topk_indices.where(valid, key_length).amin(-1).tolist()
    highs = topk_indices.where(valid, -1).amax(-1).tolist()
    cuts = []
    for b in range(batch):
        for first in range(0, query_length, rows):
            part = slice(first, min(first + rows, query_length))
            low, high = min(lows[b][part]), max(highs[b][part]) + 1
            low = min(low // _WIDTH_STEP * _WIDTH_STEP, key_length - 1)
            high = min(max(-(-high // _WIDTH_STEP), 1) * _WIDTH_STEP, key_length)
            cuts.append(_Cut(b, part, min(low, high - 1), high))

    def chunks(share: Sequence[_Cut]) -> Iterator[_Chunk]:
        for cut in share:
            indices = topk_indices[cut.batch, cut.rows].to(torch.int64)
            width = cut.high - cut.low
            columns = (indices - cut.low).masked_fill_(~names_key(indices, key_length), width)
            yield _Chunk(
                cut.batch, cut.rows, slice(cut.low, cut.high), keys[cut.batch][cut.low : cut.high], columns
            )

    def of_thread(share: Sequence[_Cut]) -> Result:
        return work(chunks(share), Scratch(dtype))

    return share_out(cuts, of_thread)


def _multiply(a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0, add: bool = False) -> None:
    """``scale * (a @ b)`` into ``out``, or added to it: ``[m, k]``, ``[k, n]`` -> ``[m, n]``."""
    if not one_by_one(2 * a.shape[0] * a.shape[1] * b.shape[1], a.dtype):
        torch.addmm(out, a, b, beta=float(add), alpha=scale, out=out)
        return
    product = linear(a, b.t())
    if add:
        out.add_(product, alpha=scale)
    else:
        torch.mul(product, scale, out=out)
