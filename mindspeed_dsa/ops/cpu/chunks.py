"""Chunks of query rows with a dense range of keys, shared by the CPU backends' dense algorithms.

Gathering the selected keys of each query takes the same time for any number of heads, and the matmuls that
follow are small. If a sequence is only a few times as long as the selection, dense matmuls are faster. A
chunk of rows is multiplied with every key from the first to the last that any of them selected, and the other
keys are masked. That is more work, but in a few large matmuls.

Masked entries are multiplied with zero, which hides finite numbers only: infinity or NaN in an unselected key
would reach the result. Calls with non-finite operands gather keys instead, see :func:`products_are_finite`.
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

# Bytes per thread for the scores of a chunk; causal rows take half of it on average. Scores beyond the cache
# then cost less than the calls that more chunks would make.
_CHUNK_BYTES = 1 << 20
# Rows of one sequence in a chunk. Fewer than the minimum only if one sequence fills the chunk by itself.
_FEWEST_ROWS, _MOST_ROWS = 32, 64
# Widths are rounded up to this, so that the number of distinct product shapes stays small.
_WIDTH_STEP = 64
NOT_FINITE = "what it masks has to be far from overflowing"
# Below it, sums of a few products stay finite.
_LARGEST_PRODUCT = 1e37


def products_are_finite(*tensors: Tensor, factor: float = 1.0) -> bool:
    """Return whether dot products of the tensors' rows, times ``factor``, cannot overflow or be NaN."""
    # By Cauchy-Schwarz a scalar product is at most the product of the rows' lengths, and no row is longer
    # than its whole tensor.
    lengths = [
        float(torch.linalg.vector_norm(tensor.detach(), dtype=compute_dtype(tensor.dtype)))
        for tensor in tensors
    ]
    # A comparison with NaN is false.
    return math.prod(1 + length for length in lengths) * (1 + abs(factor)) < _LARGEST_PRODUCT


@dataclass(frozen=True)
class Chunk:
    """Range of query rows, in several sequences, and the smallest range of keys with all their selections."""

    batch: slice
    rows: slice
    keys: slice
    key: Tensor
    """``[g, width, dim]``: keys of the range in the dtype of the products."""
    columns: Tensor
    """``[g, n, topk]`` int64: column of the range for each entry; ``width``, one past the end, for no key."""
    has_empty_row: bool
    """Whether some row selected no key."""

    @property
    def width(self) -> int:
        """Number of keys in the range."""
        return self.key.shape[1]

    def tiles(self, widest: int) -> Iterator[slice]:
        """Split the key range into slices of at most ``widest`` keys, relative to the range's first key."""
        for first in range(0, self.width, widest):
            yield slice(first, min(first + widest, self.width))

    def spread(self, entries: Tensor, scratch: Scratch) -> Tensor:
        """Scatter-add ``[g, n, topk]`` values of selected entries to ``[g, n, width]``, one per key."""
        # The additional last column collects entries that name no key.
        by_key = scratch("spread", *self.columns.shape[:2], self.width + 1).zero_()  # [g, n, width + 1]
        return by_key.scatter_add_(2, self.columns, entries)[..., :-1]


class Cut(NamedTuple):
    """Range of query rows, in several sequences, and the range ``[low, high)`` of the keys they selected."""

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
    """Cut the rows of ``topk_indices`` into chunks and call ``work`` on them in threads.

    ``work`` is called once per thread, with a share of the chunks and its own scratch. The shares depend only
    on the shapes, the indices and the number of threads.

    Args:
        key: ``[batch, key_length, dim]``.
        topk_indices: ``[batch, query_length, topk]`` int32 or int64, any strides. Entries outside
            ``[0, key_length)`` name no key.
        heads: number of scores per row and key.
        work: function that takes its chunks in order.
        widest: maximum number of keys for which ``work`` holds scores at once; None for the whole range.

    Returns:
        Result of ``work`` per thread, in a fixed order.
    """
    batch, query_length, _ = topk_indices.shape
    key_length, dtype = key.shape[1], compute_dtype(key.dtype)
    keys = key.detach().to(dtype).contiguous()  # [batch, key_length, dim]
    workers = worker_count(batch * query_length * heads * key_length)
    threads = max(torch.get_num_threads() // workers, 1)
    most = threads * _CHUNK_BYTES // (heads * min(widest or key_length, key_length) * dtype.itemsize)
    together, rows = rows_of_sequences(batch, max(most, 1), _MOST_ROWS)
    positions, cuts = cut_rows(topk_indices, key_length, together, rows)

    def chunks(share: Sequence[Cut]) -> Iterator[Chunk]:
        for group, part, low, high, has_empty_row in share:
            # [g, n, topk]; entries without a key are key_length and become width.
            columns = positions[group, part].to(torch.int64, copy=True).sub_(low).clamp_max_(high - low)
            yield Chunk(group, part, slice(low, high), keys[group, low:high], columns, has_empty_row)

    def of_thread(share: Sequence[Cut]) -> Result:
        return work(chunks(share), Scratch(dtype))

    return share_out(cuts, of_thread, workers)


def cut_rows(topk_indices: Tensor, key_length: int, together: int, rows: int) -> tuple[Tensor, list[Cut]]:
    """Split the query rows of all sequences into cuts, and find the range of keys that each cut selected.

    Args:
        topk_indices: ``[batch, query_length, topk]``; entries outside ``[0, key_length)`` name no key.
        key_length: number of keys.
        together: sequences per cut.
        rows: rows per cut in each sequence.

    Returns:
        ``topk_indices`` with invalid entries replaced by ``key_length``, and the cuts.
    """
    batch, query_length, _ = topk_indices.shape
    valid = names_key(topk_indices, key_length)  # [batch, query_length, topk]
    positions = topk_indices.where(valid, key_length)  # [batch, query_length, topk]
    lows = positions.amin(-1)  # [batch, query_length]
    highs = topk_indices.where(valid, -1).amax(-1)  # [batch, query_length]
    cuts = []
    for b in range(0, batch, together):
        group = slice(b, min(b + together, batch))
        # Extremes over the sequences of the group, [query_length] each.
        lowest, highest = lows[group].amin(0).tolist(), highs[group].amax(0).tolist()
        emptiest = lows[group].amax(0).tolist()
        for first in range(0, query_length, rows):
            part = slice(first, min(first + rows, query_length))
            low, high = min(lowest[part]), max(highest[part]) + 1
            high = min(max(-(-high // _WIDTH_STEP), 1) * _WIDTH_STEP, key_length)
            # Rows without keys have low = key_length, beyond high.
            low = min(low, high - 1) // _WIDTH_STEP * _WIDTH_STEP
            cuts.append(Cut(group, part, low, high, max(emptiest[part]) == key_length))
    return positions, cuts


def rows_of_sequences(batch: int, most: int, most_each: int) -> tuple[int, int]:
    """Return how many sequences, and how many rows of each, to process together.

    A PyTorch call costs more than the work of a few rows, so short sequences are processed together. With
    causal attention, fewer rows per sequence need fewer keys.

    Args:
        batch: number of sequences.
        most: maximum number of rows of all sequences together.
        most_each: maximum number of rows of one sequence.
    """
    together = min(batch, max(most // _FEWEST_ROWS, 1))
    return together, min(most // together, most_each)
