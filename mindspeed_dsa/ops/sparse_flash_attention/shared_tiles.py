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
import triton.language as tl
from torch import Tensor

from mindspeed_dsa.ops.triton.common import on_grid

# Neighbours that may share a tile, and the keys of one.
FELLOWS, TILE = 4, 64
# Entries of a row that a program holds at once.
_MOST_ENTRIES = 8192
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


@triton.jit
def position_of(wanted, row_indices, length, BITS: tl.constexpr):
    """Where ``wanted`` stand in an ascending list, or would, and whether they do."""
    position = tl.zeros_like(wanted)
    for step in tl.static_range(BITS):
        further = position + (1 << (BITS - 1 - step))
        before = tl.load(row_indices + further - 1, mask=further <= length, other=0)
        position = tl.where((further <= length) & (before < wanted), further, position)
    found = tl.load(row_indices + position, mask=position < length, other=-1)
    return position, (position < length) & (found == wanted)


@triton.jit
def is_ascending(row_indices, length, key_length, BLOCK: tl.constexpr):
    """Return whether the first entries of a row are keys, each after the one before it."""
    position = tl.arange(0, BLOCK)
    index = tl.load(row_indices + position, mask=position < length, other=0)
    previous = tl.load(row_indices + position - 1, mask=(position > 0) & (position < length), other=-1)
    wrong = (position < length) & ((index <= previous) | (index >= key_length))
    return tl.sum(wrong.to(tl.int32), axis=0) == 0


@triton.jit
def find_shared_kernel(
    indices, lengths, shared, rows, first_row, rows_per_batch, key_length, topk,
    FELLOWS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One program per four rows: marks what all have in common, and what two of them have.

    ``shared`` is ``[2, rows, topk]`` int8, zeros: one where four rows share, and where two do. ``first_row``
    is the number of the first row over the batch.
    """
    row = (tl.program_id(0) * FELLOWS).to(tl.int64)
    position = tl.arange(0, BLOCK)
    plane = rows.to(tl.int64) * topk
    batch = (first_row + row) // rows_per_batch
    everyone = True
    for other in tl.static_range(FELLOWS):
        is_row = (row + other < rows) & ((first_row + row + other) // rows_per_batch == batch)
        everyone = everyone & is_row
        if is_row:
            everyone &= is_ascending(
                indices + (row + other) * topk, tl.load(lengths + row + other), key_length, BLOCK
            )
    if everyone:
        starts = indices + row * topk
        length = tl.load(lengths + row)
        index = tl.load(starts + position, mask=position < length, other=-1)
        is_entry = position < length
        second, by_two = position_of(index, starts + topk, tl.load(lengths + row + 1), BITS)
        third, by_three = position_of(index, starts + 2 * topk, tl.load(lengths + row + 2), BITS)
        fourth, by_four = position_of(index, starts + 3 * topk, tl.load(lengths + row + 3), BITS)
        by_two = by_two & is_entry
        by_all = by_two & by_three & by_four
        marks = shared + row * topk
        one = tl.full([BLOCK], 1, tl.int8)
        tl.store(marks + position, one, mask=by_all)
        tl.store(marks + topk + second, one, mask=by_all)
        tl.store(marks + 2 * topk + third, one, mask=by_all)
        tl.store(marks + 3 * topk + fourth, one, mask=by_all)
        tl.store(marks + plane + position, one, mask=by_two)
        tl.store(marks + plane + topk + second, one, mask=by_two)
        length = tl.load(lengths + row + 2)
        index = tl.load(starts + 2 * topk + position, mask=position < length, other=-1)
        fourth, by_two = position_of(index, starts + 3 * topk, tl.load(lengths + row + 3), BITS)
        by_two = by_two & (position < length)
        tl.store(marks + plane + 2 * topk + position, one, mask=by_two)
        tl.store(marks + plane + 3 * topk + fourth, one, mask=by_two)


@triton.jit
def reorder_kernel(
    indices, shared, reordered, places, ends, rows, topk, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row: whole tiles of what four share, of what two share, and everything else.

    Each part keeps its order. What would not fill a tile goes on to the next part, in all rows that share it.
    """
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, BLOCK)
    inside = position < topk
    marks = shared + row * topk
    index = tl.load(indices + row * topk + position, mask=inside, other=-1)
    by_four = tl.load(marks + position, mask=inside, other=0).to(tl.int32)
    by_two = tl.load(marks + rows.to(tl.int64) * topk + position, mask=inside, other=0).to(tl.int32)
    first_end = tl.sum(by_four, axis=0) // TILE * TILE
    four_rank = tl.cumsum(by_four, axis=0) - 1
    by_four = (by_four > 0) & (four_rank < first_end)
    by_two = tl.where(by_four, 0, by_two)
    second_end = first_end + tl.sum(by_two, axis=0) // TILE * TILE
    two_rank = first_end + tl.cumsum(by_two, axis=0) - 1
    by_two = (by_two > 0) & (two_rank < second_end)
    rest = inside & ~by_four & ~by_two
    rest_rank = second_end + tl.cumsum(rest.to(tl.int32), axis=0) - 1
    place = tl.where(by_four, four_rank, tl.where(by_two, two_rank, rest_rank))
    tl.store(reordered + row * topk + place, index, mask=inside)
    tl.store(places + row * topk + place, position, mask=inside)
    tl.store(ends + row * 2, first_end)
    tl.store(ends + row * 2 + 1, second_end)


@triton.jit
def rows_of(row, ends, lengths, inside, TILE: tl.constexpr):
    """Tiles that four rows share, ends of those that two share, and of all, of some rows."""
    by_four = tl.load(ends + row * 2, mask=inside, other=0) // TILE
    by_two = tl.load(ends + row * 2 + 1, mask=inside, other=0) // TILE
    return by_four, by_two, tl.cdiv(tl.load(lengths + row, mask=inside, other=0), TILE)


@triton.jit
def list_tasks_kernel(
    ends, lengths, tasks, bounds, rows, tiles, chunk, abreast,
    TILE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program per ``abreast`` rows: their tasks, behind those of all rows before them."""
    first = tl.program_id(0) * abreast
    before = tl.zeros([1024], tl.int32)
    for start in range(0, first, 1024):
        row = start + tl.arange(0, 1024)
        by_four, by_two, last = rows_of(row, ends, lengths, row < first, TILE)
        # As the first of four or of two a row has those that it shares; it always has the rest.
        before += last - tl.where(row % 2 == 0, 0, by_two - by_four) - tl.where(row % 4 == 0, 0, by_four)
    place = tl.sum(before, axis=0)
    part = first // chunk
    if first % chunk == 0:
        tl.store(bounds + part * 4, place)
        if part > 0:
            tl.store(bounds + part * 4 - 3, place)
    turn = tl.arange(0, BLOCK_R)
    row = first + turn
    inside = (turn < abreast) & (row < rows)
    by_four, by_two, last = rows_of(row, ends, lengths, inside, TILE)
    tile = tl.arange(0, BLOCK_T)[:, None]
    # [tiles, rows]
    sharers = tl.where(tile < by_four[None, :], 4, tl.where(tile < by_two[None, :], 2, 1))
    exists = (tile < last[None, :]) & (row[None, :] % sharers == 0)
    numbers = tl.reshape(exists.to(tl.int32), [BLOCK_T * BLOCK_R])
    position = place + tl.reshape(tl.cumsum(numbers, axis=0) - 1, [BLOCK_T, BLOCK_R])
    task = ((row - part * chunk)[None, :] * tiles + tile) * 8 + sharers
    tl.store(tasks + position, task, mask=exists)
    if first + abreast >= rows:
        tl.store(bounds + part * 4 + 1, place + tl.sum(numbers, axis=0))


def share_tiles(
    indices: Tensor, lengths: Tensor, first: int, rows_per_batch: int, key_length: int, chunk: int
) -> SharedTiles:
    """Put the entries of some rows in the order of :class:`SharedTiles`.

    Rows share nothing whose entries do not ascend, or name something that is no key before their last key;
    nor do the last ones of a sequence that are no four.

    Args:
        indices: ``[rows, topk]`` int32, contiguous; of more than 8192 entries nothing is shared.
        lengths: of these rows and maybe others after them, int32, one past a row's last entry that is a key.
        first: number of the first row over the batch.
        rows_per_batch: rows of a sequence.
        key_length: keys of a sequence.
        chunk: rows that are taken together; below four nothing is shared.
    """
    rows, topk = indices.shape
    places = torch.empty_like(indices)
    if topk > _MOST_ENTRIES or chunk < FELLOWS:
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

    Of 64 rows the first tiles come before the second ones. A tile is listed with the first row that shares it.

    Args:
        ends: of :class:`SharedTiles`.
        lengths: of at least these rows.
        topk: entries of a row.
        chunk: rows of a chunk, as :func:`whole_chunk` returns it.

    Returns:
        ``(row of the chunk * tiles of a row + tile) * 8 + rows that share it`` for each tile; and
        ``[chunks, 4]``, the first one of each chunk, one past its last, and nothing. int32.
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
