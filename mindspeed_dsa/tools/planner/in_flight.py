"""Schedules from formulas: which forwards are open when a rank's activations are at their peak.

The same orders as ``mindspeed_dsa.schedule.megatron_order`` reads off an installed Megatron; a test compares
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_dsa.schedule.events import Event, Kind, Schedule
from mindspeed_dsa.tools.planner.job import Job


def warmups(ranks: int, rank: int, chunks: int, microbatches: int, group: int, pairs: bool) -> int:
    """Forwards of a rank before its first backward."""
    if ranks == 1:
        return int(pairs)
    count = (ranks - rank - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * group
    return min(count + (pairs and chunks > 1), microbatches * chunks)


def table(chunks: int, microbatches: int, group: int) -> list[tuple[int, int]]:
    """``(chunk, microbatch)`` of a rank's forwards; backwards follow it from the last chunk to the first."""
    return [
        (chunk, microbatch)
        for start in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(start, min(start + group, microbatches))
    ]


def schedule(job: Job, most: int | None = None) -> Schedule:
    """1F1B, or interleaved 1F1B, of a step.

    Args:
        job: planned.
        most: microbatches, where fewer say enough.
    """
    layout, features = job.layout, job.features
    microbatches = min(job.microbatches, most or job.microbatches)
    group = layout.group if layout.vpp > 1 else microbatches
    forwards = table(layout.vpp, microbatches, group)
    backwards = [(layout.vpp - 1 - chunk, microbatch) for chunk, microbatch in forwards]
    lists = []
    for rank in range(layout.pp):
        ahead = warmups(layout.pp, rank, layout.vpp, microbatches, group, features.pairs)
        paired = features.pairs and (layout.vpp > 1 or layout.pp == 1)
        events = [Event(Kind.FORWARD, *each) for each in forwards[:ahead]]
        for index, backward in enumerate(backwards):
            pair = index if paired and ahead + index < len(forwards) else None
            if ahead + index < len(forwards):
                events.append(Event(Kind.FORWARD, *forwards[ahead + index], pair))
            events.append(Event(Kind.BACKWARD, *backward, pair))
        lists.append(tuple(events))
    name = "interleaved 1F1B" if layout.vpp > 1 else "1F1B"
    return Schedule(name, tuple(lists), layout.vpp, microbatches)


def peak(job: Job, rank: int, weights: Sequence[float]) -> tuple[tuple[int, ...], float]:
    """Open forwards of each chunk when they weigh most.

    Args:
        job: planned.
        rank: of the pipeline.
        weights: bytes of one open forward, by chunk.

    Returns:
        Their number by chunk, and the bytes.
    """
    layout, microbatches = job.layout, job.microbatches
    group = layout.group if layout.vpp > 1 else microbatches
    ahead = warmups(layout.pp, rank, layout.vpp, microbatches, group, job.features.pairs)
    # Past the first backwards the order repeats itself.
    enough = min(
        microbatches, -(-(ahead + 2 * layout.vpp * max(layout.pp, layout.group)) // layout.vpp) + group
    )
    if layout.vpp == 1:
        enough = min(microbatches, ahead + 2)
        group = enough
    forwards = table(layout.vpp, enough, group)
    open_now = [0] * layout.vpp
    best, heaviest = tuple(open_now), 0.0
    for index, (chunk, _) in enumerate(forwards):
        open_now[chunk] += 1
        now = sum(count * weight for count, weight in zip(open_now, weights, strict=True))
        if now > heaviest:
            best, heaviest = tuple(open_now), now
        if index >= ahead:
            back = layout.vpp - 1 - forwards[index - ahead][0]
            open_now[back] -= 1
    return best, heaviest
