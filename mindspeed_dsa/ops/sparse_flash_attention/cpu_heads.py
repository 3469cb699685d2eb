"""Sparse attention by head on CPU: dense, masked matmuls of query chunks with a range of keys.

Keys by head are a third as wide as absorbed ones, and nothing is gathered: keys of the range that a row did
not select are masked. That is less work than the absorbed form unless there are many times as many keys as a
row selects. Softmax and its gradient are one pass each over scores that stay in cache. For short sequences,
several heads and several sequences share a call, because a call costs more than their work.

The forward is split by rows, because the probabilities are summed over heads. The backward is split by heads,
each processed by one thread, so that nothing is summed over threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import Call
from mindspeed_dsa.ops.cpu.blocks import Scratch
from mindspeed_dsa.ops.cpu.chunks import NOT_FINITE, Cut, cut_rows, products_are_finite
from mindspeed_dsa.ops.cpu.products import compute_dtype, product
from mindspeed_dsa.ops.cpu.threads import share_out, worker_count
from mindspeed_dsa.ops.sparse_flash_attention.protocol import softmax

# Bytes of the scores of a chunk; there are two or three tensors of this size. With fewer rows they would fit
# the second-level cache. But every chunk reads and writes the gradients of keys once, and libraries repack
# the keys for every product.
_CHUNK_BYTES = 4 << 20
_FEWEST_ROWS, _MOST_ROWS = 32, 256
# Heads per pass over the rows in the backward, which share its masks. Their keys should stay in cache.
_HEADS_TOGETHER = 4
# Number added to masked scores; other scores are far larger.
_HIDES = -torch.finfo(torch.float32).max


@dataclass(frozen=True)
class HeadsCall(Call):
    """Arguments of attention by head; their shapes have been checked.

    Attributes:
        query: ``[batch, query_length, heads, dim]``.
        key: ``[batch, key_length, heads, dim]``.
        value: ``[batch, key_length, heads, value_dim]``.
        topk_indices: ``[batch, query_length, topk]``; entries outside ``[0, key_length)`` name no key.
        softmax_scale: factor of the scores.
        sink: ``[heads]`` logits of :class:`AttentionCall`, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    topk_indices: Tensor
    softmax_scale: float
    sink: Tensor | None = None


def declines(call: HeadsCall) -> str | None:
    """Return why this module's forward is unsafe for a call (a masked product may overflow), or None."""
    return _not_finite(call.query, call)


def declines_gradient(call: HeadsCall, grad_out: Tensor) -> str | None:
    """Return why this module's backward is unsafe for a call (a masked product may overflow), or None."""
    return _not_finite(grad_out, call)


def _not_finite(rows: Tensor, call: HeadsCall) -> str | None:
    finite = products_are_finite(rows, call.key, call.value, factor=call.softmax_scale)
    return None if finite else NOT_FINITE


def forward(call: HeadsCall, with_sum: bool) -> tuple[Tensor, Tensor | None]:
    """Return the output and the sum of the probabilities over heads.

    Their shapes are ``[batch, query_length, heads, value_dim]`` and ``[batch, query_length, topk]``; the sum
    is None unless requested.
    """
    query, key, value, topk_indices = call.query, call.key, call.value, call.topk_indices
    heads, value_dim, dtype = query.shape[2], value.shape[3], compute_dtype(query.dtype)
    out = query.new_empty(*query.shape[:3], value_dim)  # [batch, query_length, heads, value_dim]
    attention_sum = torch.empty(topk_indices.shape, dtype=dtype) if with_sum else None
    # [batch, heads, key_length, dim] and [batch, heads, key_length, value_dim]
    keys, values = (_by_head(x.detach(), dtype) for x in (key, value))
    plan = _Plan.of(topk_indices, key.shape[1], heads, dtype)

    def work(share: Sequence[_Chunk]) -> None:
        scratch = Scratch(dtype)
        for chunk in share:
            place, mask = chunk.at, chunk.mask(scratch)  # [g, rows, width]
            some, rows, width = mask.shape
            total = scratch("total", some, rows, width).zero_() if attention_sum is not None else None
            for part in _parts(range(heads), plan.heads):
                q = _rows_by_head(query[place][:, :, part], scratch, "query")
                scores = _masked_scores(
                    q, keys[place[0], part, chunk.keys], mask, call.softmax_scale, scratch
                )
                softmax(scores, _of_part(call.sink, part), scores)
                full = scratch("out", *q.shape[:2], rows, value_dim)  # [g, part heads, rows, value_dim]
                _multiply(scores, values[place[0], part, chunk.keys], full)
                out[place][:, :, part] = full.transpose(1, 2)  # [g, rows, part heads, value_dim]
                if total is not None:
                    total.add_(scores[:, 0] if scores.shape[1] == 1 else scores.sum(1))
            if attention_sum is not None and total is not None:
                torch.gather(total, 2, chunk.columns, out=attention_sum[place])  # [g, rows, topk]
            # So far a row without a key has attended to one key, and entries that name no key have got the
            # sum of the row's first key.
            if chunk.names_none is not None:
                out[place].masked_fill_(chunk.names_none.all(-1)[..., None, None], 0)
                if attention_sum is not None:
                    attention_sum[place].masked_fill_(chunk.names_none, 0)

    share_out(plan.chunks, work, plan.workers)
    return out, attention_sum


def backward(call: HeadsCall, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and sink (None without a sink)."""
    query, key, value, softmax_scale = call.query, call.key, call.value, call.softmax_scale
    batch, key_length, heads, dim = key.shape
    value_dim, dtype = value.shape[3], compute_dtype(query.dtype)
    grad_query, grad_key, grad_value = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    # Each thread adds up some heads of some sequences.
    grad_sink = None if call.sink is None else torch.zeros(batch, heads, dtype=dtype)
    plan = _Plan.of(call.topk_indices, key_length, heads, dtype)
    shares = -(-plan.workers // batch)
    # Heads per group: few enough that every thread gets a group.
    several = max(min(max(plan.heads, _HEADS_TOGETHER), heads // shares), 1)
    groups = [
        (slice(b, min(b + plan.sequences, batch)), group)
        for b in range(0, batch, plan.sequences)
        for group in _parts(range(heads), several)
    ]

    def work(share: Sequence[tuple[slice, slice]]) -> None:
        scratch = Scratch(dtype)
        for of, group in share:
            shape = (of.stop - of.start, group.stop - group.start, key_length)  # [g, group heads, key_length]
            keys, values = (
                scratch(name, *shape, x.shape[3]).copy_(x[of, :, group].transpose(1, 2))
                for name, x in (("keys", key), ("values", value))
            )
            # Gradients of keys and values, added up over the chunks.
            to_keys, to_values = (
                scratch(name, *shape, size).zero_()
                for name, size in (("to_keys", dim), ("to_values", value_dim))
            )
            for chunk in plan.chunks:
                if chunk.at[0] != of:
                    continue
                place, mask = chunk.at, chunk.mask(scratch)
                for part in _parts(range(group.start, group.stop), min(plan.heads, several)):
                    here = slice(part.start - group.start, part.stop - group.start)  # heads within the group
                    q = _rows_by_head(query[place][:, :, part], scratch, "query")
                    grad = _rows_by_head(grad_out[place][:, :, part], scratch, "grad")
                    if chunk.names_none is not None:
                        grad.masked_fill_(chunk.names_none.all(-1)[:, None, :, None], 0)
                    key_range, value_range = keys[:, here, chunk.keys], values[:, here, chunk.keys]
                    scores = _masked_scores(q, key_range, mask, softmax_scale, scratch)
                    sink = _of_part(call.sink, part)
                    top = None if sink is None else scores.amax(dim=-1)  # [g, part heads, rows]
                    softmax(scores, sink, scores)
                    _multiply(scores.mT, grad, to_values[:, here, chunk.keys], add=True)
                    grad_scores = scratch("grad_scores", *scores.shape)
                    _multiply(grad, value_range.mT, grad_scores)
                    if grad_sink is not None and sink is not None and top is not None:
                        products = torch.mul(grad_scores, scores, out=scratch("products", *scores.shape))
                        # The sink's probability, from the most probable key's; 1 where that is 0. The
                        # logarithms are added first: exp(sink - top) alone can overflow.
                        best = scores.amax(dim=-1)  # [g, part heads, rows]
                        of_sink = (sink - top).add_(best.log()).exp_().masked_fill_(best == 0, 1)
                        # The sum of the products is dO . out: [g, part heads, rows]
                        grad_sink[of.start, part] -= (of_sink * products.sum(dim=-1)).sum(dim=(0, 2))
                    # In place: gradient of the scores, without softmax_scale. The scale is applied to the
                    # products below, which are smaller.
                    torch.ops.aten._softmax_backward_data.out(
                        grad_scores, scores, -1, dtype, grad_input=grad_scores
                    )
                    full = scratch("grad_query", *q.shape)
                    _multiply(grad_scores, key_range, full, softmax_scale)
                    grad_query[place][:, :, part] = full.transpose(1, 2)  # [g, rows, part heads, dim]
                    _multiply(grad_scores.mT, q, to_keys[:, here, chunk.keys], softmax_scale, add=True)
            grad_key[of, :, group] = to_keys.transpose(1, 2)  # [g, key_length, group heads, dim]
            grad_value[of, :, group] = to_values.transpose(1, 2)

    share_out(groups, work, plan.workers)
    return grad_query, grad_key, grad_value, None if grad_sink is None else grad_sink.sum(dim=0)


def _of_part(sink: Tensor | None, part: slice) -> Tensor | None:
    """Return the sinks of some heads, ``[part heads, 1]``, broadcast over ``[g, part heads, rows]``."""
    return None if sink is None else sink[part, None]


def _by_head(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``[batch, length, heads, dim]`` as ``[batch, heads, length, dim]``, contiguous, in ``dtype``."""
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).contiguous()


def _rows_by_head(x: Tensor, scratch: Scratch, name: str) -> Tensor:
    """Copy ``[g, rows, heads, dim]`` to scratch as ``[g, heads, rows, dim]``, in the scratch's dtype."""
    some, rows, heads, dim = x.shape
    return scratch(name, some, heads, rows, dim).copy_(x.transpose(1, 2))


def _masked_scores(
    query: Tensor, key: Tensor, mask: Tensor, softmax_scale: float, scratch: Scratch
) -> Tensor:
    """Return ``softmax_scale * query @ key.mT + mask``, ``[g, heads, rows, keys]``; heads share the mask."""
    some, rows, width = mask.shape
    scores = scratch("scores", some, query.shape[1], rows, width).copy_(mask[:, None])
    _multiply(query, key.mT, scores, softmax_scale, add=True)
    return scores


def _multiply(a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0, add: bool = False) -> None:
    """Call :func:`product` on ``[g, heads, m, k]`` and ``[g, heads, k, n]`` with merged leading axes."""
    product(_flat(a), _flat(b), _flat(out), scale, add)


def _flat(x: Tensor) -> Tensor:
    some, heads = x.shape[:2]
    return x.view(some * heads, *x.shape[2:])  # [g * heads, m, n]


def _parts(heads: range, most: int) -> Iterator[slice]:
    for first in range(heads.start, heads.stop, most):
        yield slice(first, min(first + most, heads.stop))


class _Chunk:
    """Range of query rows, in several sequences, and the smallest range of keys with all their selections."""

    def __init__(self, cut: Cut, positions: Tensor, key_length: int) -> None:
        self.at = (cut.batch, cut.rows)
        self.keys = slice(cut.low, cut.high)
        of_rows = positions[self.at]  # [g, rows, topk]
        none = of_rows == key_length
        self.names_none = none if bool(none.any()) else None
        """``[g, rows, topk]``: whether an entry names no key; None if every entry names one."""
        # An entry that names no key stands for the row's first key, which the mask shows already.
        first = of_rows.amin(-1, keepdim=True).clamp_max(cut.high - 1)  # [g, rows, 1]
        self.columns = of_rows.where(~none, first).to(torch.int64).sub_(cut.low)
        """``[g, rows, topk]``: columns of the entries, counted from the range's first key."""

    def mask(self, scratch: Scratch) -> Tensor:
        """Return ``[g, rows, keys of the range]``: 0 for keys that a row selected, else ``_HIDES``."""
        some, rows, _ = self.columns.shape
        mask = scratch("mask", some, rows, self.keys.stop - self.keys.start).fill_(_HIDES)
        # scatter_ takes a third of the time with a tensor of zeros compared with a scalar.
        return mask.scatter_(2, self.columns, mask.new_zeros(1, 1, 1).expand_as(self.columns))


class _Plan(NamedTuple):
    """Chunks of a call, and the division of its work into products and threads."""

    chunks: list[_Chunk]
    sequences: int
    """Sequences per chunk; if several, all heads are taken together."""
    heads: int
    """Heads per product."""
    workers: int
    """Number of threads that should share the work."""

    @classmethod
    def of(cls, topk_indices: Tensor, key_length: int, heads: int, dtype: torch.dtype) -> _Plan:
        batch, query_length, _ = topk_indices.shape
        workers = worker_count(batch * query_length * heads * key_length)
        most = max(torch.get_num_threads() // workers, 1) * _CHUNK_BYTES // (key_length * dtype.itemsize)
        rows = min(max(most, _FEWEST_ROWS), _MOST_ROWS, query_length)
        together = max(most // rows, 1)
        sequences = max(min(together // heads, batch), 1) if workers == 1 else 1
        positions, cuts = cut_rows(topk_indices, key_length, sequences, rows)
        chunks = [_Chunk(cut, positions, key_length) for cut in cuts]
        return cls(chunks, sequences, min(together, heads), workers)
