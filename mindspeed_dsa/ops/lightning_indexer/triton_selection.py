"""Triton kernel that selects the highest scores of each row, exactly and in a fixed order.

A sample of the row guesses a floor that somewhat more than ``topk`` scores reach. One pass over the row lists
these, and what is wanted of them is found in registers. If too many reach it, the list is the sample for a
second guess. Where that fails as well, because too many scores are equal or the sample misled, the bits of
the ``topk``-th highest score are counted out in four more passes over the row.

Shapes beside the code: G groups of four neighbours, each in one thread.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Scores of a sample that lie side by side, which one access reads.
_NEIGHBOURS: tl.constexpr = tl.constexpr(8)
# Scores of a row that the selection lists before it finds the last one to be taken: a program's registers.
_MIN_LIST, _MAX_LIST = 1024, 8192


def selection_constants(topk: int) -> dict[str, Any]:
    """Return the sizes of the selection's list, sample and blocks for so many entries of a row."""
    length = min(_MAX_LIST, max(_MIN_LIST, triton.next_power_of_2(2 * topk)))
    return {"LIST": length, "SAMPLE": 4096, "BLOCK": 2048}


@triton.jit
def ordered_bits(scores):
    """Unsigned integers in the order of the scores; -0.0 and 0.0 give the same one, NaN 1, and none is 0."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    # Flip the sign bit of positive numbers and all bits of negative ones.
    flipped = bits ^ ((bits >> 31) | -2147483648)
    return tl.where(scores == scores, flipped, 1).to(tl.uint32, bitcast=True)


@triton.jit
def score_of(bits):
    """A score with these bits, which are no NaN's."""
    flipped = bits.to(tl.int32, bitcast=True)
    return (flipped ^ (~(flipped >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def bits_at(scores_of_row, position, start, end, key_length):
    """:func:`ordered_bits` at some positions, 0 at those that the row does not see.

    Loads are bounded by the last key, not by what the row sees: four scores at a time.
    """
    scores = tl.load(scores_of_row + position, mask=position < key_length, other=0.0)
    seen = (position >= start) & (position < end)
    return tl.where(seen, ordered_bits(scores), 0)


@triton.jit
def quarters(tile):
    """The columns of ``[G, 4]``; what a thread holds stays with it."""
    even, odd = tl.split(tl.reshape(tile, [tile.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def floor_of(bits, low, high, least, most):
    """A value that ``least`` to ``most`` of the bits reach; where ties leave none, the last with ``least``.

    At least ``least`` of them reach ``low``, and fewer ``high``.
    """
    high = tl.minimum(high, tl.max(bits, axis=0) + 1)
    while high - low > 1:
        middle = low + (high - low) // 2
        count = tl.sum((bits >= middle).to(tl.int32), axis=0)
        enough = count >= least
        low = tl.where(enough, middle, low)
        high = tl.where(enough, tl.where(count <= most, middle + 1, high), middle)
    return low


@triton.jit
def guess(sample, low, length, topk, LIST: tl.constexpr):
    """A value that somewhat fewer than ``LIST`` of ``length`` scores reach, if the sample is like them."""
    part = tl.sum((sample > 0).to(tl.int32), axis=0).to(tl.float32) / length
    aim = part * (topk + LIST * 2) / 3
    high = tl.zeros([], tl.uint32) + 0xFFFFFFFF
    return floor_of(sample, low, high, tl.ceil(aim * 0.95).to(tl.int32), (aim * 1.05).to(tl.int32))


@triton.jit
def list_scores(
    scores_of_row,
    listed_indices,
    listed_scores,
    start,
    end,
    key_length,
    floor,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List in order the first ``LIST`` scores whose bits reach ``floor``, and where they are; count all."""
    group = tl.arange(0, BLOCK // 4) * 4
    neighbour = group[:, None] + tl.arange(0, 4)[None, :]
    # All bits reach 1, those of NaN too, for which no comparison of scores holds.
    everything = tl.zeros([BLOCK // 4], tl.uint32) + floor == 1
    least = score_of(tl.maximum(floor, 0x007FFFFF))
    length = (end - start).to(tl.uint32)
    count = tl.zeros([], tl.int32)
    # Blocks begin at their multiples.
    for first in tl.range(start // BLOCK * BLOCK, end, BLOCK, num_stages=3):
        # [G, 4]
        scores = tl.load(scores_of_row + first + neighbour, mask=first + neighbour < key_length, other=0.0)
        scores = quarters(scores)
        here = tl.zeros([BLOCK // 4], tl.int32)
        for column in tl.static_range(4):
            seen = (first + group + column - start).to(tl.uint32) < length
            here += (seen & ((scores[column] >= least) | everything)).to(tl.int32)
        slot = count + tl.cumsum(here, axis=0) - here
        for column in tl.static_range(4):
            seen = (first + group + column - start).to(tl.uint32) < length
            reach = seen & ((scores[column] >= least) | everything)
            tl.store(listed_indices + slot, first + group + column, mask=reach & (slot < LIST))
            tl.store(listed_scores + slot, scores[column], mask=reach & (slot < LIST))
            slot += reach.to(tl.int32)
        count += tl.sum(here, axis=0)
    return count


@triton.jit
def next_digit(
    scores_of_row,
    start,
    end,
    key_length,
    prefix,
    wanted,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The next ``WIDTH`` bits of the last score to be taken, ``SHIFT`` from the lowest: one pass over a row.

    Takes and returns the bits known before, and how many scores that begin with them are still to be taken.
    """
    lane = tl.arange(0, BLOCK)
    digit = tl.arange(0, 1 << WIDTH)
    counts = tl.zeros([1 << WIDTH], tl.int32)
    for first in range(start // BLOCK * BLOCK, end, BLOCK):
        bits = bits_at(scores_of_row, first + lane, start, end, key_length)
        counted = bits > 0
        if SHIFT + WIDTH < 32:
            counted = counted & ((bits >> (SHIFT + WIDTH)) == prefix)
        digits = ((bits >> SHIFT) & ((1 << WIDTH) - 1)).to(tl.int32)
        counts += tl.histogram(tl.where(counted, digits, 0), 1 << WIDTH)
        # What is not counted was put to digit 0.
        counts -= tl.where(digit == 0, BLOCK - tl.sum(counted.to(tl.int32), axis=0), 0)
    # Scores with at least this digit, for each digit: falls from all to few.
    at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    chosen = tl.sum((at_least >= wanted).to(tl.int32), axis=0) - 1
    wanted -= tl.sum(tl.where(digit > chosen, counts, 0), axis=0)
    return (prefix << WIDTH) | chosen.to(tl.uint32), wanted


@triton.jit
def store_kept(out_indices, out_scores, positions, scores, seen, last, wanted, above, ties):
    """Store a block's part of what is kept: what exceeds ``last``, and the first ``wanted`` that equal it.

    ``positions``, ``scores`` and ``seen`` are ``[G, 4]``. ``above`` scores that exceed it, and ``ties``, came
    before the block; returns both after it.
    """
    bits = quarters(tl.where(seen, ordered_bits(scores), 0))
    positions, scores = quarters(positions), quarters(scores)
    # Both counts in one scan: a block has fewer than 2^15 scores. Where nothing is seen, bits may be `last`.
    here = tl.zeros_like(positions[0])
    for column in tl.static_range(4):
        equal = (bits[column] == last) & (bits[column] > 0)
        here += (bits[column] > last).to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(here, axis=0) - here
    for column in tl.static_range(4):
        exceeds = bits[column] > last
        equal = (bits[column] == last) & (bits[column] > 0)
        ties_before = ties + (before >> 16)
        slot = above + (before & 65535) + tl.minimum(ties_before, wanted)
        kept = exceeds | (equal & (ties_before < wanted))
        tl.store(out_indices + slot, positions[column], mask=kept)
        tl.store(out_scores + slot, scores[column], mask=kept)
        before += exceeds.to(tl.int32) + (equal.to(tl.int32) << 16)
    both = tl.sum(here, axis=0)
    return above + (both & 65535), ties + (both >> 16)


@triton.jit
def select_kernel(
    slab,
    starts,
    ends,
    listed_indices,
    listed_scores,
    topk_indices,
    topk_scores,
    key_length,
    topk,
    LIST: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: the topk highest scores of its range, ascending positions, -1 at the tail.

    ``listed_indices`` and ``listed_scores`` are ``[rows, LIST]``, for the programs' own use. What is selected
    depends on the scores alone: counts do not depend on the order in which threads count.
    """
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + row)
    end = tl.load(ends + row)
    scores_of_row = slab + row * key_length
    listed_indices += row * LIST
    listed_scores += row * LIST
    topk_indices += row * topk
    topk_scores += row * topk
    length = tl.maximum(end - start, 0)
    lane = tl.arange(0, BLOCK)
    taken = tl.minimum(length, topk)
    if length <= topk:
        for first in range(0, length, BLOCK):
            inside = first + lane < length
            scores = tl.load(scores_of_row + start + first + lane, mask=inside)
            tl.store(topk_indices + first + lane, start + first + lane, mask=inside)
            tl.store(topk_scores + first + lane, scores, mask=inside)
    else:
        floor = tl.zeros([], tl.uint32) + 1
        if length > LIST:
            sampled = tl.arange(0, SAMPLE)
            step = tl.maximum(length // (SAMPLE // _NEIGHBOURS), _NEIGHBOURS)
            position = (start + sampled // _NEIGHBOURS * step) // _NEIGHBOURS * _NEIGHBOURS
            position += sampled % _NEIGHBOURS
            sample = bits_at(scores_of_row, position, start, end, key_length)
            floor = guess(sample, floor, length, topk, LIST)
        count = list_scores(
            scores_of_row, listed_indices, listed_scores, start, end, key_length, floor, LIST, BLOCK
        )
        # Before what other threads listed is read.
        tl.debug_barrier()
        entry = tl.arange(0, LIST)
        if count > LIST:
            # What is listed is a larger sample, of the scores that matter.
            sample = bits_at(listed_scores, entry, 0, LIST, LIST)
            floor = guess(sample, floor, count, topk, LIST)
            tl.debug_barrier()
            count = list_scores(
                scores_of_row, listed_indices, listed_scores, start, end, key_length, floor, LIST, BLOCK
            )
            tl.debug_barrier()
        group = tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
        above = tl.zeros([], tl.int32)
        ties = tl.zeros([], tl.int32)
        if (count <= LIST) & (count >= topk):
            bits = bits_at(listed_scores, entry, 0, count, LIST)
            # If all are wanted, none is left to find.
            high = tl.where(count == topk, floor + 1, 0xFFFFFFFF).to(tl.uint32)
            last = floor_of(bits, floor, high, topk, topk)
            wanted = topk - tl.sum((bits > last).to(tl.int32), axis=0)
            for first in range(0, count, BLOCK):
                inside = first + group < count
                positions = tl.load(listed_indices + first + group, mask=inside, other=0)
                scores = tl.load(listed_scores + first + group, mask=inside, other=0.0)
                above, ties = store_kept(
                    topk_indices, topk_scores, positions, scores, inside, last, wanted, above, ties
                )
        else:
            # The bits known so far, and how many scores that begin with them are still to be taken.
            last = tl.zeros([], tl.uint32)
            wanted = tl.zeros([], tl.int32) + topk
            for digit in tl.static_range(4):
                last, wanted = next_digit(
                    scores_of_row, start, end, key_length, last, wanted, 24 - 8 * digit, 8, BLOCK
                )
            for first in range(start // BLOCK * BLOCK, end, BLOCK):
                positions = first + group
                scores = tl.load(scores_of_row + positions, mask=positions < key_length, other=0.0)
                inside = (positions >= start) & (positions < end)
                above, ties = store_kept(
                    topk_indices, topk_scores, positions, scores, inside, last, wanted, above, ties
                )
    for first in range(0, topk, BLOCK):
        slot = first + lane
        empty = (slot >= taken) & (slot < topk)
        tl.store(topk_indices + slot, -1, mask=empty)
        tl.store(topk_scores + slot, float("-inf"), mask=empty)
