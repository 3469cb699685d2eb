"""Key tiles shared by neighboring query rows, gathered once, with gradients added to memory once.

Neighboring rows select mostly the same keys. Each row's entries are reordered: first whole tiles of keys that
four neighbors have in common, then whole tiles that two of them have, then the rest. Shared keys are at the
same positions in all rows that share them. Rows keep all their entries, so unshared keys cost nothing extra.
The backward processes a shared tile as if it were one row with two or four times the heads. The sum over the
sharing rows is formed in registers and written once.
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

# Neighbors that may share a tile, and keys per tile.
FELLOWS, TILE = 4, 64
# Entries of a row that a program holds at once.
MOST_ENTRIES = 8192
# Rows whose first tiles are processed before their second ones, and so on. Their queries and output gradients
# fit into the second-level cache, and so do the keys that they select around the same position.
_ABREAST = 64


class SharedTiles(NamedTuple):
    """Selected entries of some rows, reordered into shared tiles for the backward."""

    indices: Tensor
    """``[rows, topk]`` int32: keys of each row, reordered."""
    places: Tensor
    """``[rows, topk]`` int32: original position of each entry."""
    ends: Tensor
    """``[rows, 2]`` int32: one past the entries that four rows share, and one past those that two share."""


def share_tiles(
    indices: Tensor, lengths: Tensor, first: int, rows_per_batch: int, key_length: int, chunk: int
) -> SharedTiles:
    """Reorder the entries of some rows as :class:`SharedTiles` describes.

    Rows are grouped by four, counted from ``first``. A group shares nothing if it spans two sequences, or if
    the entries of one of its rows do not ascend or contain an invalid entry before the last key.

    Args:
        indices: ``[rows, topk]`` int32, contiguous, with at most :data:`MOST_ENTRIES` entries per row.
        lengths: int32, one past the last entry that is a key, for these rows and possibly more after them.
        first: batch-wide number of the first row.
        rows_per_batch: rows of a sequence.
        key_length: keys of a sequence.
        chunk: rows that are processed together; below four nothing is shared.
    """
    rows, topk = indices.shape
    places = torch.empty_like(indices)  # [rows, topk]
    if chunk < FELLOWS:
        places.copy_(torch.arange(topk, device=indices.device))
        return SharedTiles(indices, places, indices.new_zeros(rows, 2))
    reordered = torch.empty_like(indices)  # [rows, topk]
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
    """List the tiles of some rows, chunk by chunk.

    Tiles are listed by groups of 64 rows: first tile 0 of all rows in the group, then tile 1, and so on. A
    shared tile is listed once, for the first row that has it.

    Args:
        ends: field of :class:`SharedTiles`.
        lengths: one past the last key entry of each row; it may have more rows.
        topk: entries of a row.
        chunk: rows of a chunk: all rows, or a result of :func:`whole_chunk`.

    Returns:
        Tasks, int32: ``(row of the chunk * tiles of a row + tile) * 8 + rows that share it`` for each tile.
        Bounds, ``[chunks, 4]`` int32: the first task of each chunk, one past its last, and two unused
        numbers.
    """
    rows, device = len(ends), ends.device
    tiles = triton.cdiv(topk, TILE)
    abreast = min(_ABREAST, chunk)
    tasks = torch.empty(rows * tiles, dtype=torch.int32, device=device)
    # Padded to 4 numbers, so that each chunk's bounds are 16-byte aligned: kernels are compiled for aligned
    # pointers.
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
    """Return the largest chunk of at most ``rows`` rows that :func:`tasks_of` accepts."""
    for step in (_ABREAST, FELLOWS):
        if rows >= step:
            return rows - rows % step
    return rows


def added_by_others(ends: Tensor, topk: int) -> Tensor:
    """Return ``[rows, topk]`` bool: True where an earlier row's shared tile includes the entry's gradient."""
    position = torch.arange(topk, device=ends.device)  # [topk]
    row = torch.arange(len(ends), device=ends.device)[:, None]  # [rows, 1]
    by_four = (position < ends[:, :1]) & (row % FELLOWS != 0)
    return by_four | ((position >= ends[:, :1]) & (position < ends[:, 1:]) & (row % 2 != 0))
