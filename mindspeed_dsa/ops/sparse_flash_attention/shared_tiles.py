"""Tiles of keys that neighbouring rows share: their keys are gathered, and their gradients added, once.

Rows next to each other select mostly the same keys. The entries of each row are put in another order: first
whole tiles of keys that four neighbours have in common, then whole tiles that two of them have, then the
rest; the same keys stand at the same places of all rows that share them. A row keeps its entries and their
number, so that what nobody shares costs nothing. The backward takes a shared tile as one of two or four times
as many heads: the sum over rows is formed in registers, and leaves once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from mindspeed_dsa.ops.sparse_flash_attention.shared_tiles_kernels import (
    find_shared_kernel,
    list_tasks_kernel,
    reorder_kernel,
)
from mindspeed_dsa.ops.triton.launch import on_grid

# Neighbours that may share a tile, and the keys of one.
FELLOWS, TILE = 4, 64
# Entries of a row that a program holds at once.
MOST_ENTRIES = 8192
# Rows whose tiles are taken one after another before a row has its next: their queries and output gradients
# fit into the second-level cache, and what they select at about the same place in their rows as well.
_ABREAST = 64


class SharedTiles(NamedTuple):
    """Entries of some rows in the order in which the backward takes them."""

    indices: Tensor
    """``[rows, topk]`` int32: the keys of each row, in another order."""
    places: Tensor
    """``[rows, topk]`` int32: where each of them was."""
    ends: Tensor
    """``[rows, 2]`` int32: one past the entries that four rows share, and past those that two share."""


def share_tiles(
    indices: Tensor, lengths: Tensor, first: int, rows_per_batch: int, key_length: int, chunk: int
) -> SharedTiles:
    """Put the entries of some rows in the order of :class:`SharedTiles`.

    Neighbours are four rows whose number over the batch, from ``first`` on, begins with a multiple of four.
    They share nothing where they are of two sequences, or of a row whose entries do not ascend or name
    something that is no key before its last key.

    Args:
        indices: ``[rows, topk]`` int32, contiguous, of at most :data:`MOST_ENTRIES` entries.
        lengths: of these rows and maybe others after them, int32, one past a row's last entry that is a key.
        first: number of the first row over the batch.
        rows_per_batch: rows of a sequence.
        key_length: keys of a sequence.
        chunk: rows that are taken together; below four nothing is shared.
    """
    rows, topk = indices.shape
    places = torch.empty_like(indices)
    if chunk < FELLOWS:
        places.copy_(torch.arange(topk, device=indices.device))
        return SharedTiles(indices, places, indices.new_zeros(rows, 2))
    reordered = torch.empty_like(indices)
    ends = torch.empty(rows, 2, dtype=torch.int32, device=indices.device)
    shared = torch.zeros(2, rows, topk, dtype=torch.int8, device=indices.device)
    size = triton.next_power_of_2(topk)
    constants = {"BLOCK": size, "num_warps": 8 if size >= 2048 else 4}
    on_grid(find_shared_kernel, triton.cdiv(rows, FELLOWS))(
        *(indices, lengths, shared, rows, first, rows_per_batch, key_length, topk),
        FELLOWS=FELLOWS,
        BITS=topk.bit_length(),
        **constants,
    )
    on_grid(reorder_kernel, rows)(
        *(indices, shared, reordered, places, ends, rows, topk), TILE=TILE, **constants
    )
    return SharedTiles(reordered, places, ends)


def tasks_of(ends: Tensor, lengths: Tensor, topk: int, chunk: int) -> tuple[Tensor, Tensor]:
    """List the tiles of some rows, chunk after chunk of them.

    Of 64 rows the first tiles come before the second ones. A tile is listed with the first row that has it.

    Args:
        ends: of :class:`SharedTiles`.
        lengths: of at least these rows.
        topk: entries of a row.
        chunk: rows of a chunk, all of them or as many as :func:`whole_chunk` returns.

    Returns:
        ``(row of the chunk * tiles of a row + tile) * 8 + rows that share it`` for each tile; and
        ``[chunks, 4]``, the first one of each chunk, one past its last, and two that are not used. int32.
    """
    rows, device = len(ends), ends.device
    tiles = triton.cdiv(topk, TILE)
    abreast = min(_ABREAST, chunk)
    tasks = torch.empty(rows * tiles, dtype=torch.int32, device=device)
    # So wide that every chunk's begin at a multiple of 16 bytes: kernels are compiled for such pointers.
    bounds = torch.empty(triton.cdiv(rows, chunk), 4, dtype=torch.int32, device=device)
    on_grid(list_tasks_kernel, triton.cdiv(rows, abreast))(
        *(ends, lengths, tasks, bounds, rows, tiles, chunk, abreast),
        TILE=TILE,
        BLOCK_T=triton.next_power_of_2(tiles),
        BLOCK_R=_ABREAST,
        num_warps=4,
    )
    return tasks, bounds


def whole_chunk(rows: int) -> int:
    """Return how many of at most so many rows :func:`tasks_of` takes for a chunk."""
    for step in (_ABREAST, FELLOWS):
        if rows >= step:
            return rows - rows % step
    return rows


def added_by_others(ends: Tensor, topk: int) -> Tensor:
    """Return ``[rows, topk]``: whether the gradient of an entry leaves with that of an earlier row."""
    position = torch.arange(topk, device=ends.device)
    row = torch.arange(len(ends), device=ends.device)[:, None]
    by_four = (position < ends[:, :1]) & (row % FELLOWS != 0)
    return by_four | ((position >= ends[:, :1]) & (position < ends[:, 1:]) & (row % 2 != 0))
