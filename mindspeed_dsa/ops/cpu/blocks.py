"""Cache-sized blocks of query rows with gathered keys, shared by the CPU backends.

A small matmul (one query's heads times its selected keys) runs at the speed of a large one as long as the
gathered keys are still in cache. Keys are therefore gathered for one or a few query rows at a time (a tile).
Scratch is allocated once and reused, because touching fresh pages costs as much as the work. Steps that need
no keys run for several tiles at once (a block), because each PyTorch call has a fixed cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from mindspeed_dsa.ops.checks import names_key
from mindspeed_dsa.ops.cpu.products import compute_dtype, linear, one_by_one, product
from mindspeed_dsa.ops.cpu.threads import share_out, worker_count

Result = TypeVar("Result")

# Bytes per thread: gathered keys of a tile, and the other scratch of a block.
_TILE_BYTES = 5 << 18
_BLOCK_BYTES = 1 << 20
_TILES_PER_BLOCK = 8
# Widths are rounded up to this, so that the number of distinct product shapes stays small.
_WIDTH_STEP = 64


class Scratch:
    """Scratch buffers of one operator call, reused from block to block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return an uninitialized contiguous buffer; it reuses the memory of earlier buffers of this name."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self.dtype)
        return buffer[:size].view(shape)


@dataclass(frozen=True)
class Block:
    """A few query rows of one sequence and the keys they selected."""

    batch: int
    rows: slice
    indices: Tensor
    """``[n, width]`` int64, contiguous; 0 where ``invalid``."""
    invalid: Tensor | None
    """``[n, width]`` bool, or None when every entry names a key."""
    _key: Tensor
    _tile_rows: int
    _scratch: Scratch

    def tiles(self, *rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None, list[Tensor]]]:
        """Gather the keys of a few of the block's rows at a time.

        Args:
            rows: tensors whose first axis is the block's rows.

        Yields:
            Keys ``[n, width, dim]``, zero for invalid entries and overwritten by the next tile; then the
            tile's slices of ``indices``, of ``invalid`` and of each tensor in ``rows``.
        """
        rows_per_tile, (count, width) = self._tile_rows, self.indices.shape
        # [tile rows, width, dim] and, for index_select, [tile rows * width, dim]
        keys = self._scratch("keys", min(rows_per_tile, count), width, self._key.shape[1])
        flat = keys.view(-1, keys.shape[2])
        parts = [x.split(rows_per_tile) for x in (self.indices, *rows)]
        hidden = None if self.invalid is None else self.invalid.split(rows_per_tile)
        for number, (indices, *tiles) in enumerate(zip(*parts, strict=True)):
            if indices.shape[0] < keys.shape[0]:  # the last tile has fewer rows
                keys = keys[: indices.shape[0]]
                flat = keys.view(-1, keys.shape[2])
            torch.index_select(self._key, 0, indices.view(-1), out=flat)  # [n * width, dim]
            invalid = None if hidden is None else hidden[number]
            if invalid is not None:
                keys.masked_fill_(invalid[..., None], 0)  # [n, width, 1] over dim
            yield keys, indices, invalid, tiles


class _Cut(NamedTuple):
    batch: int
    rows: slice
    width: int
    complete: bool


def over_blocks(
    key: Tensor,
    topk_indices: Tensor,
    scratch_per_entry: int,
    work: Callable[[Iterator[Block], Scratch], Result],
) -> list[Result]:
    """Cut the rows of ``topk_indices`` into blocks and call ``work`` on them in threads.

    ``work`` is called once per thread, with a share of the blocks and its own scratch. The shares depend only
    on the shapes and the number of threads.

    Args:
        key: ``[batch, key_length, dim]``.
        topk_indices: ``[batch, query_length, topk]`` int32 or int64, any strides. Entries outside
            ``[0, key_length)`` name no key.
        scratch_per_entry: count of numbers that ``work`` allocates per selected entry of a block.
        work: function that takes its blocks in order. A block's width is the smallest that holds its valid
            entries, rounded up, so that rows with few visible keys cost little.

    Returns:
        Result of ``work`` per thread, in a fixed order.
    """
    batch, query_length, topk = topk_indices.shape
    dtype = compute_dtype(key.dtype)
    # The latent keys are small, so they are widened once for all blocks; gathering then copies them as they
    # are.
    keys = [one.detach().to(dtype).contiguous() for one in key]  # batch x [key_length, dim]
    tile_rows, rows = _tile_and_block_rows(topk * key.shape[2] * dtype.itemsize, topk * scratch_per_entry)
    cuts = []
    # 1-based position of each entry, so that `lasts` is one past a row's last valid entry.
    slot = torch.arange(1, topk + 1, dtype=torch.int32)  # [topk]
    for b in range(batch):
        valid = names_key(topk_indices[b], key.shape[1])  # [query_length, topk]
        counts, lasts = valid.sum(-1).tolist(), (valid * slot).amax(-1).tolist()  # [query_length] each
        for first in range(0, query_length, rows):
            part = slice(first, min(first + rows, query_length))
            width = min(topk, -(-max(*lasts[part], 1) // _WIDTH_STEP) * _WIDTH_STEP)
            # A block is complete if every row fills the width: then no mask is needed.
            cuts.append(_Cut(b, part, width, min(counts[part]) >= width))

    def blocks(share: Sequence[_Cut], scratch: Scratch) -> Iterator[Block]:
        for b, part, width, complete in share:
            indices = topk_indices[b, part, :width]  # [n, width]
            invalid = None if complete else ~names_key(indices, key.shape[1])
            # index_add_ is three times as fast with 64-bit indices as with 32-bit ones.
            indices = indices.to(torch.int64)
            if invalid is not None:
                indices = indices.masked_fill(invalid, 0)
            yield Block(b, part, indices.contiguous(), invalid, keys[b], tile_rows, scratch)

    def of_thread(share: Sequence[_Cut]) -> Result:
        scratch = Scratch(dtype)
        return work(blocks(share, scratch), scratch)

    return share_out(cuts, of_thread)


def _tile_and_block_rows(key_bytes: int, scratch_numbers: int) -> tuple[int, int]:
    """Return the number of query rows per tile and per block, given the memory that one row needs."""
    # PyTorch threads within each of our worker threads.
    threads = max(torch.get_num_threads() // worker_count(), 1)
    tile = threads * max(_TILE_BYTES // max(key_bytes, 1), 1)
    tiles = _BLOCK_BYTES * threads // max(4 * scratch_numbers * tile, 1)
    return tile, tile * min(max(tiles, 1), _TILES_PER_BLOCK)


def add_to_keys(total: Tensor, indices: Tensor, a: Tensor, b: Tensor, scratch: Scratch) -> None:
    """Add row ``s`` of ``a[i].mT @ b[i]`` to row ``indices[i, s]`` of ``total``, in a fixed order.

    Args:
        total: ``[key_length, dim]``.
        indices: ``[n, width]`` int64, row of ``total`` for each entry.
        a: ``[n, m, width]``; zero in the columns of invalid entries.
        b: ``[n, m, dim]``, contiguous.
        scratch: buffers for the products.
    """
    n, m, width = a.shape
    if one_by_one(2 * m * width * b.shape[2], a.dtype):
        for i in range(n):
            total.index_add_(0, indices[i], linear(a[i].t(), b[i].t()))  # [width, dim]
    else:
        products = scratch("products", n, width, b.shape[2])  # [n, width, dim]
        product(a.transpose(1, 2), b, products)
        total.index_add_(0, indices.flatten(), products.flatten(0, 1))  # [n * width, dim]


def sum_in_order(totals: Sequence[Tensor]) -> Tensor:
    """Return the sum of the threads' totals, in a fixed order; overwrites the first one."""
    for other in totals[1:]:
        totals[0].add_(other)
    return totals[0]
