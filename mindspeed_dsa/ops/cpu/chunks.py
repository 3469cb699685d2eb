"""Shared by the CPU backends' dense forms: rows times all keys around those that they selected.

Gathering the selected keys of every row takes time however few heads use them, and leaves small products.
Where a sequence is only some times as long as the selection, less time goes into products of a chunk of rows
with every key from the first to the last that any of them selected, the others being masked: the work is
more, but it is a handful of large products.

What is masked is multiplied with zero, which hides numbers only: infinity or NaN in a key that no row
selected would spread. With such operands keys are gathered, see :func:`products_are_finite`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from mindspeed_dsa.ops.checks import names_key
from mindspeed_dsa.ops.cpu.blocks import Scratch
from mindspeed_dsa.ops.cpu.products import compute_dtype
from mindspeed_dsa.ops.cpu.threads import share_out, worker_count

Result = TypeVar("Result")

# Bytes that the scores of a chunk may take, per thread; causal rows take half of that on average. What no
# longer fits into the cache then costs less than the calls that more chunks would make.
_CHUNK_BYTES = 1 << 20
# Rows of one sequence in a chunk; fewer than the least only where one sequence alone fills it.
_FEWEST_ROWS, _MOST_ROWS = 32, 64
# Widths are rounded up to this, so that the number of distinct product shapes stays small.
_WIDTH_STEP = 64
NOT_FINITE = "what it masks has to be far from overflowing"
# Sums of a few products stay finite below it.
_LARGEST_PRODUCT = 1e37


def products_are_finite(*tensors: Tensor, factor: float = 1.0) -> bool:
    """Return whether ``factor`` times a row of each of the tensors is a number, and far from overflowing."""
    # No scalar product is larger than the lengths multiplied, and no row is longer than all of its tensor.
    lengths = [
        float(torch.linalg.vector_norm(tensor.detach(), dtype=compute_dtype(tensor.dtype)))
        for tensor in tensors
    ]
    # NaN is not less than anything.
    return math.prod(1 + length for length in lengths) * (1 + abs(factor)) < _LARGEST_PRODUCT


@dataclass(frozen=True)
class Chunk:
    """The same rows of some sequences and the range of keys that they selected from."""

    batch: slice
    rows: slice
    keys: slice
    key: Tensor
    """``[g, width, dim]``: the range's keys in the dtype of the products."""
    columns: Tensor
    """``[g, n, topk]`` int64: which column an entry names; ``width``, one too many, where it names no key."""
    has_empty_row: bool
    """Whether a row names no key."""

    @property
    def width(self) -> int:
        """How many keys."""
        return self.key.shape[1]

    def tiles(self, widest: int) -> Iterator[slice]:
        """The range in parts of so many keys, each counted from the range's first key."""
        for first in range(0, self.width, widest):
            yield slice(first, min(first + widest, self.width))

    def spread(self, entries: Tensor, scratch: Scratch) -> Tensor:
        """Numbers by entry, ``[g, n, topk]``, added up by key, ``[g, n, width]``; 0 where there is none."""
        by_key = scratch("spread", *self.columns.shape[:2], self.width + 1).zero_()
        return by_key.scatter_add_(2, self.columns, entries)[..., :-1]


class Cut(NamedTuple):
    """Rows of some sequences and the range of keys ``[low, high)`` that they selected from."""

    batch: slice
    rows: slice
    low: int
    high: int
    has_empty_row: bool


def over_chunks(
    key: Tensor,
    topk_indices: Tensor,
    heads: int,
    work: Callable[[Iterator[Chunk], Scratch], Result],
    widest: int | None = None,
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
        widest: keys whose scores it holds at once, if not those of the whole range.

    Returns:
        What ``work`` returned in each thread, in a fixed order.
    """
    batch, query_length, _ = topk_indices.shape
    key_length, dtype = key.shape[1], compute_dtype(key.dtype)
    keys = key.detach().to(dtype).contiguous()
    workers = worker_count(batch * query_length * heads * key_length)
    threads = max(torch.get_num_threads() // workers, 1)
    most = threads * _CHUNK_BYTES // (heads * min(widest or key_length, key_length) * dtype.itemsize)
    together, rows = rows_of_sequences(batch, max(most, 1), _MOST_ROWS)
    positions, cuts = cut_rows(topk_indices, key_length, together, rows)

    def chunks(share: Sequence[Cut]) -> Iterator[Chunk]:
        for group, part, low, high, has_empty_row in share:
            columns = positions[group, part].to(torch.int64, copy=True).sub_(low).clamp_max_(high - low)
            yield Chunk(group, part, slice(low, high), keys[group, low:high], columns, has_empty_row)

    def of_thread(share: Sequence[Cut]) -> Result:
        return work(chunks(share), Scratch(dtype))

    return share_out(cuts, of_thread, workers)


def cut_rows(topk_indices: Tensor, key_length: int, together: int, rows: int) -> tuple[Tensor, list[Cut]]:
    """Cut the rows of all sequences, and find the range of keys that each cut selected from.

    Args:
        topk_indices: ``[batch, query_length, topk]``; entries outside of the keys are none.
        key_length: number of keys.
        together: sequences in a cut.
        rows: of each of them.

    Returns:
        ``topk_indices`` with ``key_length`` where an entry names no key, and the cuts.
    """
    batch, query_length, _ = topk_indices.shape
    valid = names_key(topk_indices, key_length)
    positions = topk_indices.where(valid, key_length)
    lows = positions.amin(-1)
    highs = topk_indices.where(valid, -1).amax(-1)
    cuts = []
    for b in range(0, batch, together):
        group = slice(b, min(b + together, batch))
        # Of the rows of the group, [query_length].
        lowest, highest = lows[group].amin(0).tolist(), highs[group].amax(0).tolist()
        emptiest = lows[group].amax(0).tolist()
        for first in range(0, query_length, rows):
            part = slice(first, min(first + rows, query_length))
            low, high = min(lowest[part]), max(highest[part]) + 1
            high = min(max(-(-high // _WIDTH_STEP), 1) * _WIDTH_STEP, key_length)
            # Rows without keys have the lowest beyond the highest.
            low = min(low, high - 1) // _WIDTH_STEP * _WIDTH_STEP
            cuts.append(Cut(group, part, low, high, max(emptiest[part]) == key_length))
    return positions, cuts


def rows_of_sequences(batch: int, most: int, most_each: int) -> tuple[int, int]:
    """How many sequences, and how many rows of each, to work on at once.

    Calls cost more than the work of a few rows, so that short sequences are taken together. With causal rows,
    the fewer there are of each the fewer keys they are multiplied with.

    Args:
        batch: number of sequences.
        most: rows of all of them.
        most_each: rows of one.
    """
    together = min(batch, max(most // _FEWEST_ROWS, 1))
    return together, min(most // together, most_each)
