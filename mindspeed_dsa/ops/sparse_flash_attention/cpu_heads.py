"""Sparse attention by head on CPU: a chunk of rows times all keys around those that they selected.

Heads with keys of their own are a third as wide as absorbed ones, and nothing is gathered for them: the other
keys of the range are masked. That is less work than the absorbed form as long as the keys are not many times
the selected ones. Softmax and its gradient are one pass each over scores that stay in cache. Of short
sequences several heads, and several sequences, are taken in one call: calls cost more than their work.

Forward goes by rows, because the probabilities are summed over heads; backward by heads, each of which one
thread takes: nothing is added up over threads.
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

# Bytes of the scores of a chunk, of which there are two or three tensors. With fewer rows they would be in a
# cache of the second level, but the gradients of keys are read and written once for every chunk, and
# libraries lay out the keys anew for every product.
_CHUNK_BYTES = 4 << 20
_FEWEST_ROWS, _MOST_ROWS = 32, 256
# Heads of one pass over the rows in backward, which share its masks. Their keys should stay in cache.
_HEADS_TOGETHER = 4
# What is added to masked scores. The others stay far above.
_HIDES = -torch.finfo(torch.float32).max


@dataclass(frozen=True)
class HeadsCall(Call):
    """Arguments of attention by head, of checked shapes.

    Attributes:
        query: ``[batch, query_length, heads, dim]``.
        key: ``[batch, key_length, heads, dim]``.
        value: ``[batch, key_length, heads, value_dim]``.
        topk_indices: ``[batch, query_length, topk]``; entries outside of the keys are none.
        softmax_scale: factor of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    topk_indices: Tensor
    softmax_scale: float


def declines(call: HeadsCall) -> str | None:
    """Return why forward may not multiply with what masks hide: some product may be no number; or None."""
    return _not_finite(call.query, call)


def declines_gradient(call: HeadsCall, grad_out: Tensor) -> str | None:
    """Return the same of backward."""
    return _not_finite(grad_out, call)


def _not_finite(rows: Tensor, call: HeadsCall) -> str | None:
    finite = products_are_finite(rows, call.key, call.value, factor=call.softmax_scale)
    return None if finite else NOT_FINITE


def forward(call: HeadsCall, with_sum: bool) -> tuple[Tensor, Tensor | None]:
    """Return the output and the sum of probabilities over heads.

    ``[batch, query_length, heads, value_dim]``, and ``[batch, query_length, topk]`` or None.
    """
    query, key, value, topk_indices = call.query, call.key, call.value, call.topk_indices
    heads, value_dim, dtype = query.shape[2], value.shape[3], compute_dtype(query.dtype)
    out = query.new_empty(*query.shape[:3], value_dim)
    attention_sum = torch.empty(topk_indices.shape, dtype=dtype) if with_sum else None
    keys, values = (_by_head(x.detach(), dtype) for x in (key, value))
    plan = _Plan.of(topk_indices, key.shape[1], heads, dtype)

    def work(share: Sequence[_Chunk]) -> None:
        scratch = Scratch(dtype)
        for chunk in share:
            at, mask = chunk.at, chunk.mask(scratch)
            some, rows, width = mask.shape
            total = scratch("total", some, rows, width).zero_() if attention_sum is not None else None
            for part in _parts(range(heads), plan.heads):
                q = _rows_by_head(query[at][:, :, part], scratch, "query")
                scores = _masked_scores(q, keys[at[0], part, chunk.keys], mask, call.softmax_scale, scratch)
                torch.softmax(scores, dim=-1, out=scores)
                full = scratch("out", *q.shape[:2], rows, value_dim)
                _multiply(scores, values[at[0], part, chunk.keys], full)
                out[at][:, :, part] = full.transpose(1, 2)
                if total is not None:
                    total.add_(scores[:, 0] if scores.shape[1] == 1 else scores.sum(1))
            if attention_sum is not None and total is not None:
                torch.gather(total, 2, chunk.columns, out=attention_sum[at])
            # A row without a key has attended to one so far, and one with few lists its first for none.
            if chunk.names_none is not None:
                out[at].masked_fill_(chunk.names_none.all(-1)[..., None, None], 0)
                if attention_sum is not None:
                    attention_sum[at].masked_fill_(chunk.names_none, 0)

    share_out(plan.chunks, work, plan.workers)
    return out, attention_sum


def backward(call: HeadsCall, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    query, key, value, softmax_scale = call.query, call.key, call.value, call.softmax_scale
    batch, key_length, heads, dim = key.shape
    value_dim, dtype = value.shape[3], compute_dtype(query.dtype)
    grad_query, grad_key, grad_value = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    plan = _Plan.of(call.topk_indices, key_length, heads, dtype)
    shares = -(-plan.workers // batch)
    several = max(min(max(plan.heads, _HEADS_TOGETHER), heads // shares), 1)
    groups = [
        (slice(b, min(b + plan.sequences, batch)), group)
        for b in range(0, batch, plan.sequences)
        for group in _parts(range(heads), several)
    ]

    def work(share: Sequence[tuple[slice, slice]]) -> None:
        scratch = Scratch(dtype)
        for of, group in share:
            shape = (of.stop - of.start, group.stop - group.start, key_length)
            keys, values = (
                scratch(name, *shape, x.shape[3]).copy_(x[of, :, group].transpose(1, 2))
                for name, x in (("keys", key), ("values", value))
            )
            to_keys, to_values = (
                scratch(name, *shape, size).zero_()
                for name, size in (("to_keys", dim), ("to_values", value_dim))
            )
            for chunk in plan.chunks:
                if chunk.at[0] != of:
                    continue
                at, mask = chunk.at, chunk.mask(scratch)
                for part in _parts(range(group.start, group.stop), min(plan.heads, several)):
                    here = slice(part.start - group.start, part.stop - group.start)
                    q = _rows_by_head(query[at][:, :, part], scratch, "query")
                    grad = _rows_by_head(grad_out[at][:, :, part], scratch, "grad")
                    if chunk.names_none is not None:
                        grad.masked_fill_(chunk.names_none.all(-1)[:, None, :, None], 0)
                    key_range, value_range = keys[:, here, chunk.keys], values[:, here, chunk.keys]
                    scores = _masked_scores(q, key_range, mask, softmax_scale, scratch)
                    torch.softmax(scores, dim=-1, out=scores)
                    _multiply(scores.mT, grad, to_values[:, here, chunk.keys], add=True)
                    grad_scores = scratch("grad_scores", *scores.shape)
                    _multiply(grad, value_range.mT, grad_scores)
                    # In place: gradients of the scores with their scale, which waits for what is smaller.
                    torch.ops.aten._softmax_backward_data.out(
                        grad_scores, scores, -1, dtype, grad_input=grad_scores
                    )
                    full = scratch("grad_query", *q.shape)
                    _multiply(grad_scores, key_range, full, softmax_scale)
                    grad_query[at][:, :, part] = full.transpose(1, 2)
                    _multiply(grad_scores.mT, q, to_keys[:, here, chunk.keys], softmax_scale, add=True)
            grad_key[of, :, group] = to_keys.transpose(1, 2)
            grad_value[of, :, group] = to_values.transpose(1, 2)

    share_out(groups, work, plan.workers)
    return grad_query, grad_key, grad_value


def _by_head(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``[batch, length, heads, dim]`` -> ``[batch, heads, length, dim]``, contiguous, in ``dtype``."""
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).contiguous()


def _rows_by_head(x: Tensor, scratch: Scratch, name: str) -> Tensor:
    """``[g, rows, heads, dim]`` -> ``[g, heads, rows, dim]``, a copy in scratch, in its dtype."""
    some, rows, heads, dim = x.shape
    return scratch(name, some, heads, rows, dim).copy_(x.transpose(1, 2))


def _masked_scores(
    query: Tensor, key: Tensor, mask: Tensor, softmax_scale: float, scratch: Scratch
) -> Tensor:
    """``softmax_scale * query @ key.mT + mask``, ``[g, heads, rows, keys]``; the mask has no heads."""
    some, rows, width = mask.shape
    scores = scratch("scores", some, query.shape[1], rows, width).copy_(mask[:, None])
    _multiply(query, key.mT, scores, softmax_scale, add=True)
    return scores


def _multiply(a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0, add: bool = False) -> None:
    """As :func:`product`, of ``[g, heads, m, k]`` and ``[g, heads, k, n]``, whose first axes lie as one."""
    product(_flat(a), _flat(b), _flat(out), scale, add)


def _flat(x: Tensor) -> Tensor:
    some, heads = x.shape[:2]
    return x.view(some * heads, *x.shape[2:])


def _parts(heads: range, most: int) -> Iterator[slice]:
    for first in range(heads.start, heads.stop, most):
        yield slice(first, min(first + most, heads.stop))


class _Chunk:
    """The same rows of some sequences and the range of keys that they selected from."""

    def __init__(self, cut: Cut, positions: Tensor, key_length: int) -> None:
        self.at = (cut.batch, cut.rows)
        self.keys = slice(cut.low, cut.high)
        of_rows = positions[self.at]
        none = of_rows == key_length
        self.names_none = none if bool(none.any()) else None
        """``[g, rows, topk]``: entries that name no key; None: there is no such entry."""
        # The row's first key stands for entries that name none, wherever they are: a mask shows it already.
        first = of_rows.amin(-1, keepdim=True).clamp_max(cut.high - 1)
        self.columns = of_rows.where(~none, first).to(torch.int64).sub_(cut.low)
        """``[g, rows, topk]``, counted from the range's first key."""

    def mask(self, scratch: Scratch) -> Tensor:
        """``[g, rows, keys of the range]``: 0 where a row selected the key, what hides a score elsewhere."""
        some, rows, _ = self.columns.shape
        mask = scratch("mask", some, rows, self.keys.stop - self.keys.start).fill_(_HIDES)
        # With a tensor, though it is all the same number, it takes a third of the time.
        return mask.scatter_(2, self.columns, mask.new_zeros(1, 1, 1).expand_as(self.columns))


class _Plan(NamedTuple):
    """Cut of a call."""

    chunks: list[_Chunk]
    sequences: int
    """Rows of a chunk; of several, all heads are taken together."""
    heads: int
    """Taken together in one product."""
    workers: int
    """Threads that should share the work."""

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
