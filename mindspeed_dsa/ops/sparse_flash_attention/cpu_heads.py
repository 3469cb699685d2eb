"""Sparse attention by head on CPU: a chunk of rows times all keys around those that they selected.

Heads with keys of their own are a third as wide as absorbed ones, and nothing is gathered for them: the other
keys of the range are masked. That is less work than the absorbed form as long as the keys are not many times
the selected ones. Softmax and its gradient are one pass each over scores that stay in cache.

Forward goes by rows, because the probabilities are summed over heads; backward by heads, each of which one
thread takes: nothing is added up over threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_dsa.ops.cpu_blocks import Scratch
from mindspeed_dsa.ops.cpu_chunks import Cut, cut_rows, products_are_finite
from mindspeed_dsa.ops.cpu_packed import first_operand, multiply, pack
from mindspeed_dsa.ops.cpu_products import compute_dtype, operand_dtype
from mindspeed_dsa.ops.cpu_threads import share_out, worker_count

# Bytes of the scores of a chunk, of which there are two or three tensors. With fewer rows they would be in a
# cache of the second level, but the gradients of keys are read and written once for every chunk, and
# libraries lay out the keys anew for every product.
_CHUNK_BYTES = 4 << 20
_FEWEST_ROWS, _MOST_ROWS = 32, 256
# Heads of one pass over the rows in backward, which share its masks. Their keys should stay in cache.
_HEADS_TOGETHER = 4
# What is added to masked scores. The others stay far above.
_HIDES = -torch.finfo(torch.float32).max


def takes(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float) -> bool:
    """Whether what masks hide may be multiplied with, because every product is a number."""
    return products_are_finite(query, key, value, factor=softmax_scale)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    return_attention_sum: bool,
) -> tuple[Tensor, Tensor | None]:
    """The output, ``[batch, query_length, heads, value_dim]``, and the sum of probabilities over heads.

    Args:
        query: ``[batch, query_length, heads, dim]``.
        key: ``[batch, key_length, heads, dim]``.
        value: ``[batch, key_length, heads, value_dim]``.
        topk_indices: ``[batch, query_length, topk]``; entries outside of the keys are none.
        softmax_scale: factor of the scores.
        return_attention_sum: whether to return the sum, ``[batch, query_length, topk]``.
    """
    batch, _, heads, _ = query.shape
    value_dim, dtype, operand = value.shape[3], compute_dtype(query.dtype), operand_dtype(query.dtype)
    out = query.new_empty(*query.shape[:3], value_dim)
    attention_sum = torch.empty(topk_indices.shape, dtype=dtype) if return_attention_sum else None
    keep = Scratch(dtype)
    # [dim, key_length] and [key_length, value_dim] of every head
    keys, values = (
        [
            [pack(side(x[b, :, h].contiguous()), operand, keep, f"{name} {b} {h}") for h in range(heads)]
            for b in range(batch)
        ]
        for name, x, side in (("keys", key.detach(), Tensor.t), ("values", value.detach(), _as_it_is))
    )
    chunks, workers = _cut(topk_indices, key.shape[1], heads, dtype)

    def work(share: Sequence[_Chunk]) -> None:
        scratch = Scratch(dtype)
        for chunk in share:
            b, part = chunk.at
            rows, width, selected = chunk.rows, chunk.keys.stop - chunk.keys.start, chunk.columns
            mask = chunk.mask(scratch)
            scores = scratch("scores", rows, width)
            total = scratch("total", rows, width).zero_() if attention_sum is not None else None
            full = scratch("out", rows, value_dim)
            for h in range(heads):
                q = first_operand(query[b, part, h], operand, scratch, "query")
                multiply(q, keys[b][h].columns(chunk.keys), scores)
                torch.add(mask, scores, alpha=softmax_scale, out=scores)
                torch.softmax(scores, dim=-1, out=scores)
                probabilities = first_operand(scores, operand, scratch, "probabilities")
                multiply(probabilities, values[b][h].rows(chunk.keys), full)
                out[b, part, h] = full
                if total is not None:
                    total.add_(scores)
            if attention_sum is not None and total is not None:
                torch.gather(total, 1, selected, out=attention_sum[b, part])
            # A row without a key has attended to one so far, and one with few lists its first for none.
            if chunk.names_none is not None:
                out[b, part].masked_fill_(chunk.names_none.all(-1)[:, None, None], 0)
                if attention_sum is not None:
                    attention_sum[b, part].masked_fill_(chunk.names_none, 0)

    share_out(chunks, work, workers)
    return out, attention_sum


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, topk_indices: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    batch, _, heads, _ = query.shape
    dtype, operand = compute_dtype(query.dtype), operand_dtype(query.dtype)
    grad_query, grad_key, grad_value = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    chunks, workers = _cut(topk_indices, key.shape[1], heads, dtype)
    together = max(1, min(_HEADS_TOGETHER, heads // workers))
    groups = [
        (b, range(h, min(h + together, heads))) for b in range(batch) for h in range(0, heads, together)
    ]

    def work(share: Sequence[tuple[int, range]]) -> None:
        scratch = Scratch(dtype)
        for b, group in share:
            of_heads = [
                _Head(key[b, :, h], value[b, :, h], softmax_scale, operand, scratch, h - group.start)
                for h in group
            ]
            for chunk in chunks:
                if chunk.at[0] != b:
                    continue
                part, mask = chunk.at[1], chunk.mask(scratch)
                for h, of_head in zip(group, of_heads, strict=True):
                    grad = grad_out[b, part, h]
                    if chunk.names_none is not None:
                        grad = grad.masked_fill(chunk.names_none.all(-1)[:, None], 0)
                    grad_query[b, part, h] = of_head.gradients(query[b, part, h], grad, mask, chunk.keys)
            for h, of_head in zip(group, of_heads, strict=True):
                grad_key[b, :, h] = of_head.to_keys.mul_(softmax_scale).t()
                grad_value[b, :, h] = of_head.to_values.t()

    share_out(groups, work, workers)
    return grad_query, grad_key, grad_value


class _Head:
    """A head's keys and values, laid out for products, and their gradients, to which chunks of rows add."""

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        softmax_scale: float,
        operand: torch.dtype,
        scratch: Scratch,
        number: int,
    ) -> None:
        self._scale, self._operand, self._scratch = softmax_scale, operand, scratch
        key, value = key.contiguous(), value.contiguous()
        # [dim, key_length], [key_length, dim] and [value_dim, key_length]
        self._keys, self._keys_by_row, self._values = (
            pack(x, operand, scratch, f"{name} {number}")
            for name, x in (("keys", key.t()), ("keys by row", key), ("values", value.t()))
        )
        self.to_keys = scratch(f"to_keys {number}", *reversed(key.shape)).zero_()
        """``[dim, key_length]``, without the scale of the scores."""
        self.to_values = scratch(f"to_values {number}", *reversed(value.shape)).zero_()
        """``[value_dim, key_length]``"""

    def gradients(self, query: Tensor, grad_out: Tensor, mask: Tensor, seen: slice) -> Tensor:
        """Add what these rows give to keys and values, and return the query's gradient, ``[rows, dim]``.

        Args:
            query: ``[rows, dim]``.
            grad_out: ``[rows, value_dim]``.
            mask: ``[rows, keys of the range]``, see :meth:`_Chunk.mask`.
            seen: the range of keys.
        """
        operand, scratch, rows = self._operand, self._scratch, len(mask)
        scores, grad_scores = (scratch(name, *mask.shape) for name in ("scores", "grad_scores"))
        multiply(first_operand(query, operand, scratch, "query"), self._keys.columns(seen), scores)
        torch.add(mask, scores, alpha=self._scale, out=scores)
        torch.softmax(scores, dim=-1, out=scores)
        multiply(first_operand(grad_out, operand, scratch, "grad"), self._values.columns(seen), grad_scores)
        # Transposed, [value_dim, rows] times [rows, keys], so that the second operand is the one to lay out.
        multiply(
            first_operand(grad_out.t().contiguous(), operand, scratch, "grad transposed"),
            pack(scores, operand, scratch, "probabilities"),
            self.to_values[:, seen],
            add=True,
        )
        # In place: gradients of the scores with their scale, which waits for what is smaller.
        torch.ops.aten._softmax_backward_data.out(
            grad_scores, scores, -1, scores.dtype, grad_input=grad_scores
        )
        slopes = first_operand(grad_scores, operand, scratch, "slopes")
        grad_query = scratch("grad_query", rows, query.shape[1])
        multiply(slopes, self._keys_by_row.rows(seen), grad_query)
        multiply(
            first_operand(query.t().contiguous(), operand, scratch, "query transposed"),
            pack(slopes[:, : mask.shape[1]], operand, scratch, "slopes by column"),
            self.to_keys[:, seen],
            add=True,
        )
        return grad_query.mul_(self._scale)


def _as_it_is(x: Tensor) -> Tensor:
    return x


class _Chunk:
    """Some rows of a sequence and the range of keys that they selected from."""

    def __init__(self, cut: Cut, positions: Tensor, key_length: int) -> None:
        self.at = (cut.batch.start, cut.rows)
        self.keys = slice(cut.low, cut.high)
        of_rows = positions[self.at]
        none = of_rows == key_length
        self.names_none = none if bool(none.any()) else None
        """``[rows, topk]``: entries that name no key; None: there is no such entry."""
        # The row's first key stands for entries that name none, wherever they are: a mask shows it already.
        first = of_rows.amin(1, keepdim=True).clamp_max(cut.high - 1)
        self.columns = of_rows.where(~none, first).to(torch.int64).sub_(cut.low)
        """``[rows, topk]``, counted from the range's first key."""

    @property
    def rows(self) -> int:
        return self.columns.shape[0]

    def mask(self, scratch: Scratch) -> Tensor:
        """``[rows, keys of the range]``: 0 where a row selected the key, what hides a score elsewhere."""
        mask = scratch("mask", self.rows, self.keys.stop - self.keys.start).fill_(_HIDES)
        # With a tensor, though it is all the same number, it takes a third of the time.
        return mask.scatter_(1, self.columns, mask.new_zeros(1, 1).expand_as(self.columns))


def _cut(topk_indices: Tensor, key_length: int, heads: int, dtype: torch.dtype) -> tuple[list[_Chunk], int]:
    """All chunks, and how many threads should share them."""
    batch, query_length, _ = topk_indices.shape
    workers = worker_count(batch * query_length * heads * key_length)
    threads = max(torch.get_num_threads() // workers, 1)
    most = threads * _CHUNK_BYTES // (key_length * dtype.itemsize)
    positions, cuts = cut_rows(topk_indices, key_length, 1, min(max(most, _FEWEST_ROWS), _MOST_ROWS))
    return [_Chunk(cut, positions, key_length) for cut in cuts], workers
