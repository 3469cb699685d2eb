"""Shared by the CPU backends: the cutting of rows into cache-sized blocks whose keys are gathered.

A product with few rows (heads x head size by selected keys) runs at the speed of a large matmul as long as
the gathered keys are still in cache. Keys are therefore gathered for one query row, or a few, at a time (a
tile), and scratch is allocated once and reused, because fresh pages cost as much as the work. What needs no
keys is done for several tiles at once (a block): calls cost time too.
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

# Bytes of gathered keys that a tile may hold, and bytes beside them that a block may hold, per thread.
_TILE_BYTES = 5 << 18
_BLOCK_BYTES = 1 << 20
_TILES_PER_BLOCK = 8
# Widths are rounded up to this, so that the number of distinct product shapes stays small.
_WIDTH_STEP = 64


class Scratch:
    """Buffers that live as long as one call and are reused from block to block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """An uninitialised contiguous tensor; overlaps what the same name returned before."""
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
        """Gather the keys of some of the rows at a time.

        Args:
            rows: tensors whose first axis are the rows of the block.

        Yields:
            ``keys [n, width, dim]``, zero where there is no valid entry and overwritten by the next tile; the
            tile's part of ``indices``, of ``invalid`` and of each of ``rows``.
        """
        rows_per_tile, (count, width) = self._tile_rows, self.indices.shape
        keys = self._scratch("keys", min(rows_per_tile, count), width, self._key.shape[1])
        flat = keys.view(-1, keys.shape[2])
        parts = [x.split(rows_per_tile) for x in (self.indices, *rows)]
        hidden = None if self.invalid is None else self.invalid.split(rows_per_tile)
        for number, (indices, *tiles) in enumerate(zip(*parts, strict=True)):
            if indices.shape[0] < keys.shape[0]:
                keys = keys[: indices.shape[0]]
                flat = keys.view(-1, keys.shape[2])
            torch.index_select(self._key, 0, indices.view(-1), out=flat)
            invalid = None if hidden is None else hidden[number]
            if invalid is not None:
                keys.masked_fill_(invalid[..., None], 0)
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
    """Cut the rows of ``topk_indices`` into blocks and hand them to ``work``.

    ``work`` is called once in every thread, with some of the blocks and with scratch of its own. Which
    blocks depends on the shapes and the number of threads alone.

    Args:
        key: ``[batch, key_length, dim]``.
        topk_indices: ``[batch, query_length, topk]`` int32 or int64, any strides. Entries outside of the keys
            are none.
        scratch_per_entry: numbers that ``work`` holds per selected entry of a block.
        work: takes its blocks in order. A block's width is the least that holds every valid entry of the
            block, rounded up, so that rows with few visible keys cost little.

    Returns:
        What ``work`` returned in each thread, in a fixed order.
    """
    batch, query_length, topk = topk_indices.shape
    dtype = compute_dtype(key.dtype)
    # The latent keys are small; in the dtype of the products they are gathered as is.
    keys = [one.detach().to(dtype).contiguous() for one in key]
    tile_rows, rows = _tile_and_block_rows(topk * key.shape[2] * dtype.itemsize, topk * scratch_per_entry)
    cuts = []
    slot = torch.arange(1, topk + 1, dtype=torch.int32)
    for b in range(batch):
        valid = names_key(topk_indices[b], key.shape[1])
        counts, lasts = valid.sum(-1).tolist(), (valid * slot).amax(-1).tolist()
        for first in range(0, query_length, rows):
            part = slice(first, min(first + rows, query_length))
            width = min(topk, -(-max(*lasts[part], 1) // _WIDTH_STEP) * _WIDTH_STEP)
            cuts.append(_Cut(b, part, width, min(counts[part]) >= width))

    def blocks(share: Sequence[_Cut], scratch: Scratch) -> Iterator[Block]:
        for b, part, width, complete in share:
            indices = topk_indices[b, part, :width]
            invalid = None if complete else ~names_key(indices, key.shape[1])
            # Adding rows by 64-bit indices is three times as fast as by 32-bit ones.
            indices = indices.to(torch.int64)
            if invalid is not None:
                indices = indices.masked_fill(invalid, 0)
            yield Block(b, part, indices.contiguous(), invalid, keys[b], tile_rows, scratch)

    def of_thread(share: Sequence[_Cut]) -> Result:
        scratch = Scratch(dtype)
        return work(blocks(share, scratch), scratch)

    return share_out(cuts, of_thread)


def _tile_and_block_rows(key_bytes: int, scratch_numbers: int) -> tuple[int, int]:
    """Query rows per tile and per block, from what one row needs."""
    # What PyTorch splits inside of a thread of ours.
    threads = max(torch.get_num_threads() // worker_count(), 1)
    tile = threads * max(_TILE_BYTES // max(key_bytes, 1), 1)
    tiles = _BLOCK_BYTES * threads // max(4 * scratch_numbers * tile, 1)
    return tile, tile * min(max(tiles, 1), _TILES_PER_BLOCK)


def add_to_keys(total: Tensor, indices: Tensor, a: Tensor, b: Tensor, scratch: Scratch) -> None:
    """Add ``a[i].mT @ b[i]``, one row per selected key, to the keys' rows of ``total``, in a fixed order.

    Args:
        total: ``[key_length, dim]``.
        indices: ``[n, width]`` int64, which rows.
        a: ``[n, m, width]``; zero in the columns of invalid entries.
        b: ``[n, m, dim]``, contiguous.
        scratch: where the products may lie.
    """
    n, m, width = a.shape
    if one_by_one(2 * m * width * b.shape[2], a.dtype):
        for i in range(n):
            total.index_add_(0, indices[i], linear(a[i].t(), b[i].t()))
    else:
        products = scratch("products", n, width, b.shape[2])
        product(a.transpose(1, 2), b, products)
        total.index_add_(0, indices.flatten(), products.flatten(0, 1))


def sum_in_order(totals: Sequence[Tensor]) -> Tensor:
    """Sum of what the threads added up each, in a fixed order; the first of them is overwritten."""
    for other in totals[1:]:
        totals[0].add_(other)
    return totals[0]
