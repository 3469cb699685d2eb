"""Kernels that find the keys that neighboring rows share, reorder entries, and list the tiles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def position_of(wanted, row_indices, length, BITS: tl.constexpr):
    """Return the lower bound of ``wanted`` in an ascending row, and whether the row has ``wanted``."""
    position = tl.zeros_like(wanted)
    for step in tl.static_range(BITS):
        further = position + (1 << (BITS - 1 - step))
        before = tl.load(row_indices + further - 1, mask=further <= length, other=0)
        position = tl.where((further <= length) & (before < wanted), further, position)
    found = tl.load(row_indices + position, mask=position < length, other=-1)
    return position, (position < length) & (found == wanted)


@triton.jit
def is_ascending(row_indices, length, key_length, BLOCK: tl.constexpr):
    """Return whether the first ``length`` entries of a row are keys in strictly ascending order."""
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
    """Mark the keys that four rows have in common, and those that two have; one program per four rows.

    ``shared`` is ``[2, rows, topk]`` int8, zeroed: plane 0 marks keys that four rows share, plane 1 those
    that two share. ``first_row`` is the batch-wide number of the first row.
    """
    row = (tl.program_id(0) * FELLOWS).to(tl.int64)
    position = tl.arange(0, BLOCK)
    # int64 because of `row`. `rows` has no .to() if it is 1: Triton then makes it a constant.
    plane = (row * 0 + rows) * topk
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
    """Reorder a row: whole tiles that four rows share, then tiles that two share, then the rest.

    One program per row. Each part keeps its order. Entries that do not fill a tile move to the next part, in
    all rows that share them.
    """
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, BLOCK)
    inside = position < topk
    marks = shared + row * topk
    index = tl.load(indices + row * topk + position, mask=inside, other=-1)
    by_four = tl.load(marks + position, mask=inside, other=0).to(tl.int32)
    # int64 because of `row`. `rows` has no .to() if it is 1: Triton then makes it a constant.
    plane = (row * 0 + rows) * topk
    by_two = tl.load(marks + plane + position, mask=inside, other=0).to(tl.int32)
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
def tiles_of_rows(row, ends, lengths, inside, TILE: tl.constexpr):
    """Return each row's numbers of tiles: shared by four rows, shared by four or two rows, and all."""
    by_four = tl.load(ends + row * 2, mask=inside, other=0) // TILE
    by_two = tl.load(ends + row * 2 + 1, mask=inside, other=0) // TILE
    return by_four, by_two, tl.cdiv(tl.load(lengths + row, mask=inside, other=0), TILE)


@triton.jit
def list_tasks_kernel(
    ends, lengths, tasks, bounds, rows, tiles, chunk, abreast,
    TILE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write the tasks of ``abreast`` rows after the tasks of all previous rows; one program per group."""
    first = tl.program_id(0) * abreast
    before = tl.zeros([1024], tl.int32)
    for start in range(0, first, 1024):
        row = start + tl.arange(0, 1024)
        by_four, by_two, last = tiles_of_rows(row, ends, lengths, row < first, TILE)
        # Shared tiles count for the first of the four or two rows only; the rest counts for every row.
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
    by_four, by_two, last = tiles_of_rows(row, ends, lengths, inside, TILE)
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
