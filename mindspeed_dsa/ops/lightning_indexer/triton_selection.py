"""Triton kernel that selects the highest scores of each row, exactly and deterministically.

From a sample of the row's scores, the kernel guesses a threshold that somewhat more than ``topk`` scores
reach. One pass over the row lists these scores, and the ``topk`` best are found in registers. If too many
scores reach the threshold, the list serves as sample for a second guess. If that also fails, because too many
scores are equal or the sample was not representative, four more passes over the row determine the ``topk``-th
highest score exactly, some bits per pass (radix select).

Letter in shape comments: G groups of four neighbors, each in one thread.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Adjacent scores per sample position, which one access reads.
_NEIGHBOURS: tl.constexpr = tl.constexpr(8)
# Bounds of the list of candidate scores, which a program keeps in registers.
_MIN_LIST, _MAX_LIST = 1024, 8192


def selection_constants(topk: int) -> dict[str, Any]:
    """Return the kernel's sizes of candidate list, sample and blocks, for ``topk`` entries per row."""
    length = min(_MAX_LIST, max(_MIN_LIST, triton.next_power_of_2(2 * topk)))
    return {"LIST": length, "SAMPLE": 4096, "BLOCK": 2048}


@triton.jit
def ordered_bits(scores):
    """Return unsigned integers in the order of the scores; -0.0 equals 0.0, NaN gives 1, and 0 is unused."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    # Flip the sign bit of positive numbers and all bits of negative ones.
    flipped = bits ^ ((bits >> 31) | -2147483648)
    return tl.where(scores == scores, flipped, 1).to(tl.uint32, bitcast=True)


@triton.jit
def score_of(bits):
    """Return the score with these :func:`ordered_bits`, which must not be those for NaN."""
    flipped = bits.to(tl.int32, bitcast=True)
    return (flipped ^ (~(flipped >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def bits_at(scores_of_row, position, start, end, key_length):
    """Return :func:`ordered_bits` at some positions, 0 at positions that the row does not see.

    Loads are bounded by the last key instead of the row's range, so that they read four scores at a time.
    """
    scores = tl.load(scores_of_row + position, mask=position < key_length, other=0.0)
    seen = (position >= start) & (position < end)
    return tl.where(seen, ordered_bits(scores), 0)


@triton.jit
def quarters(tile):
    """Split ``[G, 4]`` into its four columns without moving elements between threads."""
    even, odd = tl.split(tl.reshape(tile, [tile.shape[0], 2, 2]))  # [G, 2] each
    first, third = tl.split(even)  # [G] each
    second, fourth = tl.split(odd)  # [G] each
    return first, second, third, fourth


@triton.jit
def floor_of(bits, low, high, least, most):
    """Return a threshold that at least ``least`` and at most ``most`` of the values in ``bits`` reach.

    If ties rule this out, it is the largest threshold that at least ``least`` values reach. At least
    ``least`` values must reach ``low``, and fewer must reach ``high``.
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
    """Estimate from a sample a threshold that somewhat fewer than ``LIST`` of ``length`` scores reach."""
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
    """List the first ``LIST`` scores that reach ``floor``, with their positions; return their count."""
    group = tl.arange(0, BLOCK // 4) * 4
    neighbour = group[:, None] + tl.arange(0, 4)[None, :]
    # NaN has bits 1, so a floor of 1 includes it, but no comparison of scores does.
    everything = tl.zeros([BLOCK // 4], tl.uint32) + floor == 1
    least = score_of(tl.maximum(floor, 0x007FFFFF))
    length = (end - start).to(tl.uint32)
    count = tl.zeros([], tl.int32)
    # Blocks start at multiples of BLOCK.
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
    """Determine ``WIDTH`` more bits of the ``topk``-th highest score, in one pass over a row (radix select).

    The new bits start ``SHIFT`` bits above the lowest. ``prefix`` has the bits found so far, ``wanted`` is
    the number of scores with this prefix that are still to be selected. Returns both, updated.
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
        # Entries that are not counted went to digit 0.
        counts -= tl.where(digit == 0, BLOCK - tl.sum(counted.to(tl.int32), axis=0), 0)
    # Number of scores with at least this digit, for each digit: descending.
    at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    chosen = tl.sum((at_least >= wanted).to(tl.int32), axis=0) - 1
    wanted -= tl.sum(tl.where(digit > chosen, counts, 0), axis=0)
    return (prefix << WIDTH) | chosen.to(tl.uint32), wanted


@triton.jit
def store_kept(out_indices, out_scores, positions, scores, seen, last, wanted, above, ties):
    """Store the kept scores of a block: those above ``last``, and the first ``wanted`` ties with it.

    ``positions``, ``scores`` and ``seen`` are ``[G, 4]``. ``above`` and ``ties`` are the counts of scores
    above ``last`` and of ties before the block; returns both counts after it.
    """
    bits = quarters(tl.where(seen, ordered_bits(scores), 0))
    positions, scores = quarters(positions), quarters(scores)
    # One scan for both counts: a block has fewer than 2^15 scores. Unseen entries have bits 0 and are no
    # ties, even if `last` is 0.
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
    """Select the ``topk`` highest scores in a row's range: ascending positions, -1 at the tail.

    One program per row. ``listed_indices`` and ``listed_scores`` are ``[rows, LIST]`` scratch. The selection
    depends only on the scores: counts do not depend on the order in which threads count.
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
        # Wait until all threads have written their part of the list.
        tl.debug_barrier()
        entry = tl.arange(0, LIST)
        if count > LIST:
            # The list is a larger sample than the first, of the scores that matter.
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
            # If exactly topk scores are listed, all are taken and the search is skipped.
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
            # Bits found so far, and how many scores that begin with them are still to be taken.
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
