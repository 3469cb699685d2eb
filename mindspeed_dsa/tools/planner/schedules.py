"""Pipeline schedule of a job, and the microbatches whose tensors a rank holds at its memory peak."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from mindspeed_dsa.schedule import lists, megatron_order
from mindspeed_dsa.schedule.events import Kind, Schedule
from mindspeed_dsa.tools.planner.job import Job


def warmups(ranks: int, rank: int, chunks: int, microbatches: int, group: int, pairs: bool) -> int:
    """Return the number of forwards before a rank's first backward."""
    if ranks == 1:
        return int(pairs)
    # As in Megatron. PP 4, 2 chunks, groups of 4: rank 0 runs 3 x 2 + 1 x 4 = 10 forwards.
    count = (ranks - rank - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * group
    return min(count + (pairs and chunks > 1), microbatches * chunks)


def table(chunks: int, microbatches: int, group: int) -> list[tuple[int, int]]:
    """Return ``(chunk, microbatch)`` of a rank's forwards in order; for backwards the chunks are reversed."""
    return [
        (chunk, microbatch)
        for start in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(start, min(start + group, microbatches))
    ]


def schedule(job: Job, most: int | None = None) -> Schedule:
    """Return the 1F1B, interleaved 1F1B or DualPipeV schedule, with deferred weight gradients if they are on.

    Args:
        job: planned job.
        most: limit of the number of microbatches, for callers that do not need the whole step.
    """
    layout, features = job.layout, job.features
    microbatches = min(job.microbatches, most or job.microbatches)
    if layout.v_shaped:
        return lists.dual_pipe_v(layout.pp, microbatches, features.pairs, features.split)
    # Without virtual stages, all microbatches are one group.
    group = layout.group if layout.vpp > 1 else microbatches
    sizes = (layout.pp, layout.vpp, microbatches, group, features.pairs)
    return _split(*sizes, features.waiting) if features.split else _plain(*sizes)


@lru_cache(maxsize=64)
def _plain(ranks: int, chunks: int, microbatches: int, group: int, pairs: bool) -> Schedule:
    order = table(chunks, microbatches, group)
    forwards = [(microbatch, chunk) for chunk, microbatch in order]
    backwards = [(chunks - 1 - chunk, microbatch) for chunk, microbatch in order]
    paired = pairs and (chunks > 1 or ranks == 1)
    by_rank = (
        megatron_order.events(
            forwards, backwards, warmups(ranks, rank, chunks, microbatches, group, pairs), paired
        )
        for rank in range(ranks)
    )
    name = "interleaved 1F1B" if chunks > 1 else "1F1B"
    return Schedule(name, tuple(map(tuple, by_rank)), chunks, microbatches)


@lru_cache(maxsize=64)
def _split(ranks: int, chunks: int, microbatches: int, group: int, pairs: bool, most: int | None) -> Schedule:
    return lists.weights_later(_plain(ranks, chunks, microbatches, group, pairs), most)


class Peak(NamedTuple):
    """Microbatches whose tensors a rank holds when its memory is largest.

    Attributes:
        open: number of microbatches after forward and before backward, by chunk.
        waiting: number of microbatches after backward with deferred weight gradients, by chunk.
        nbytes: bytes of the held tensors.
        pairs: bytes of these that a pair's two passes hold together in one layer.
    """

    open: tuple[int, ...]
    waiting: tuple[int, ...]
    nbytes: float
    pairs: float = 0.0


def peak(
    job: Job, rank: int, kept: Sequence[float], operands: Sequence[float], layers: Sequence[int]
) -> Peak:
    """Return the memory peak over a rank's forwards, backwards and weight gradients.

    In a pair, the backward frees a layer while the forward fills another: both together hold one layer more
    than before or after them.

    Args:
        job: planned job.
        rank: pipeline rank.
        kept: bytes of activations per microbatch, by chunk.
        operands: bytes of tensors for the deferred weight gradients per microbatch, by chunk.
        layers: number of layers, by chunk.
    """
    events = schedule(job, _enough(job)).ranks[rank]
    later = {(item.chunk, item.microbatch) for item in events if item.kind is Kind.WEIGHT}
    chunks = range(job.layout.vpp)
    open_now, waiting = [0 for _ in chunks], [0 for _ in chunks]
    best = last = Peak(tuple(open_now), tuple(waiting), 0.0)
    shared = 0.0
    for event in events:
        chunk, backward = event.chunk, event.kind is Kind.BACKWARD
        open_now[chunk] += (event.kind is Kind.FORWARD) - backward
        # Only a split backward leaves tensors for its weight gradients; DualPipeV's paired backwards are not
        # split.
        left = backward and (chunk, event.microbatch) in later
        waiting[chunk] += left - (event.kind is Kind.WEIGHT)
        nbytes = sum(open_now[index] * kept[index] + waiting[index] * operands[index] for index in chunks)
        now, both = Peak(tuple(open_now), tuple(waiting), nbytes), 0.0
        if event.pair is not None:
            if not backward:
                shared = kept[chunk] / max(1, layers[chunk])
                continue
            both, before = shared, last
            last = now
            now = max(before, now, key=lambda item: item.nbytes)
        else:
            last = now
        if now.nbytes + both > best.nbytes:
            best = now._replace(nbytes=now.nbytes + both, pairs=both)
    return best


def _enough(job: Job) -> int:
    """Return a number of microbatches that suffices to reach the memory peak; further ones only repeat."""
    layout, features = job.layout, job.features
    later = layout.pp if features.split else 0
    if layout.v_shaped:
        return 4 * layout.pp
    if layout.vpp == 1:
        return layout.pp + 1 + int(features.pairs) + later
    ahead = warmups(layout.pp, 0, layout.vpp, job.microbatches, layout.group, features.pairs)
    turns = -(-(ahead + 2 * layout.vpp * max(layout.pp, layout.group) + later) // layout.vpp)
    return turns + layout.group
