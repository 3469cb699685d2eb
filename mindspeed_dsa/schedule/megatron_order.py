"""Megatron's own schedules as lists of events, read from the installed (patched) Megatron's functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, Literal

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.schedule.events import Event, Kind, Schedule

Recompute = Literal["in place", "in advance", "in bubbles"]
"""Time of recomputation: right before the backward, ahead of every gradient, or ahead in bubbles only."""


class _Group:
    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class _Communicator:
    """Stand-in for Megatron's P2P communicator, with the attributes read by ``get_pp_rank_microbatches``."""

    def __init__(self, size: int, rank: int, chunks: int) -> None:
        self.pp_group = _Group(size, rank)
        self.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None


def schedule(
    megatron: Megatron,
    ranks: int,
    chunks: int,
    microbatches: int,
    group: int | None = None,
    forward_only: bool = False,
    paired: bool = False,
    extra_warmup: bool = False,
    recompute: Recompute | None = None,
) -> Schedule:
    """Return Megatron's 1F1B, interleaved if there is more than one chunk per rank.

    Args:
        megatron: accessor of Megatron's modules, for its schedule functions.
        ranks: pipeline parallel size.
        chunks: virtual pipeline size.
        microbatches: number of microbatches per step.
        group: ``--microbatch-group-size-per-virtual-pipeline-stage``; default: ``ranks``.
        forward_only: whether this is an evaluation.
        paired: whether the forward and backward of each 1F1B step run together as a pair.
        extra_warmup: whether to run one more warmup forward, as ``overlap_moe_expert_parallel_comm`` does.
        recompute: point at which each forward is recomputed for its backward; ``None``: no recomputation.

    Raises:
        SettingsError: Megatron rejects the sizes, or its release lacks this schedule.
    """
    group = group or ranks
    check(ranks, chunks, microbatches, group)
    if (paired or extra_warmup) and chunks == 1 < ranks:
        raise SettingsError(
            f"on {ranks} pipeline ranks with one chunk each no forward is ready beside a backward, so "
            "Megatron pairs them in interleaved pipelines alone: use at least 2 chunks"
        )
    if forward_only and (paired or extra_warmup or recompute):
        raise SettingsError("an evaluation has no backwards to pair forwards with, and recomputes nothing")
    lists = []
    for rank in range(ranks):
        warmup = warmup_of(megatron, ranks, rank, chunks, microbatches, group, forward_only, extra_warmup)
        table = _table(megatron, chunks, microbatches, group)
        backwards = [] if forward_only else backward_order(megatron, ranks, chunks, microbatches, group)
        lists.append(tuple(events(table, backwards, warmup, paired, recompute)))
    name = "interleaved 1F1B" if chunks > 1 else "1F1B"
    name += ", paired" * paired + ", +1 warmup" * extra_warmup
    name += f", recompute {recompute}" if recompute else ""
    return Schedule(name, tuple(lists), chunks, microbatches)


def backward_order(
    megatron: Megatron, ranks: int, chunks: int, microbatches: int, group: int
) -> list[tuple[int, int]]:
    """Return ``(chunk, microbatch)`` of all backwards in order; the order is the same on every rank."""
    # Backwards follow the table of forwards, with the chunks from last to first.
    return [
        (chunks - 1 - chunk, microbatch)
        for microbatch, chunk in _table(megatron, chunks, microbatches, group)
    ]


def in_bubble(index: int, backwards: int, warmup: int) -> bool:
    """Return whether a rank idles before a backward: before the first one, and in the cooldown."""
    return index == 0 or index >= backwards - warmup


def check(ranks: int, chunks: int, microbatches: int, group: int) -> None:
    """Check the sizes against the limits of Megatron's interleaved schedule.

    Raises:
        SettingsError: the sizes are not allowed; the message names the nearest allowed ones.
    """
    if min(ranks, chunks, microbatches) < 1:
        raise SettingsError("a schedule needs at least one pipeline rank, one chunk and one microbatch")
    if chunks == 1 or ranks == 1:
        return
    if not ranks <= group <= microbatches:
        raise SettingsError(
            f"the interleaved schedule needs {ranks} pipeline ranks <= group size ({group}) <= microbatches "
            f"({microbatches}): change --microbatch-group-size-per-virtual-pipeline-stage or the number of "
            "microbatches"
        )
    rest = microbatches % group
    if 0 < rest < ranks:
        raise SettingsError(
            f"{microbatches} microbatches leave a last group of {rest}, fewer than {ranks} pipeline ranks; "
            f"use {microbatches - rest} or {microbatches - rest + group} microbatches, or another "
            "--microbatch-group-size-per-virtual-pipeline-stage"
        )


def warmup_of(
    megatron: Megatron,
    ranks: int,
    rank: int,
    chunks: int,
    microbatches: int,
    group: int,
    forward_only: bool = False,
    extra_warmup: bool = False,
) -> int:
    """Return a rank's number of warmup forwards (those before its first backward)."""
    if ranks == 1:
        # Without a pipeline Megatron runs all forwards of an evaluation, and at most one forward ahead.
        return microbatches * chunks if forward_only else int(extra_warmup)
    ask = megatron("core.pipeline_parallel.schedules").get_pp_rank_microbatches
    takes = signature(ask).parameters
    options: dict[str, Any] = {"forward_only": forward_only}
    if extra_warmup:
        if "overlap_moe_expert_parallel_comm" not in takes:
            raise SettingsError(
                "this megatron-core has no extra warmup; upgrade to 0.14 or later, or omit that schedule"
            )
        options["overlap_moe_expert_parallel_comm"] = True
    if "p2p_communicator" in takes:
        options["p2p_communicator"] = _Communicator(ranks, rank, chunks)
        return int(ask(microbatches, chunks, group, **options)[2])
    with _position(megatron("core.parallel_state"), ranks, rank, chunks):
        return int(ask(microbatches, chunks, group, **options)[2])


_POSITION = (
    "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    "_MPU_PIPELINE_MODEL_PARALLEL_RANK",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
)


@contextmanager
def _position(parallel_state: Any, ranks: int, rank: int, chunks: int) -> Iterator[None]:
    """Set this pipeline rank in Megatron's global state, from which Megatron-core 0.12 and 0.13 read it."""
    before = [getattr(parallel_state, name, None) for name in _POSITION]
    setters = (
        parallel_state.set_pipeline_model_parallel_world_size,
        parallel_state.set_pipeline_model_parallel_rank,
        parallel_state.set_virtual_pipeline_model_parallel_world_size,
    )
    try:
        for setter, value in zip(setters, (ranks, rank, chunks if chunks > 1 else None), strict=True):
            setter(value)
        yield
    finally:
        for setter, value in zip(setters, before, strict=True):
            setter(value)


def _table(megatron: Megatron, chunks: int, microbatches: int, group: int) -> list[tuple[int, int]]:
    """Return ``(microbatch, chunk)`` of all forwards in order."""
    if chunks == 1:
        return [(microbatch, 0) for microbatch in range(microbatches)]
    ask = megatron("core.pipeline_parallel.schedules").get_schedule_table
    return [(int(microbatch), int(chunk)) for microbatch, chunk in ask(microbatches, chunks, group)]


def events(
    table: list[tuple[int, int]],
    backwards: list[tuple[int, int]],
    warmup: int,
    paired: bool,
    recompute: Recompute | None = None,
) -> Iterator[Event]:
    """Yield the events of one rank in order.

    Args:
        table: ``(microbatch, chunk)`` of all forwards in order.
        backwards: ``(chunk, microbatch)`` of all backwards in order.
        warmup: number of forwards before the first backward.
        paired: whether the forward and backward of each 1F1B step run together as a pair.
        recompute: point at which each forward is recomputed for its backward; ``None``: no recomputation.
    """
    forwards = [Event(Kind.FORWARD, chunk, microbatch) for microbatch, chunk in table]
    yield from forwards[:warmup]
    for index, (chunk, microbatch) in enumerate(backwards):
        # Forward `warmup + i` runs before or with backward i; the last `warmup` backwards have no forward.
        pair = index if paired and warmup + index < len(forwards) else None
        if warmup + index < len(forwards):
            forward = forwards[warmup + index]
            yield Event(Kind.FORWARD, forward.chunk, forward.microbatch, pair)
        if recompute:
            ahead = recompute == "in advance" or (
                recompute == "in bubbles" and in_bubble(index, len(backwards), warmup)
            )
            yield Event(Kind.RECOMPUTE, chunk, microbatch, ahead=ahead)
        yield Event(Kind.BACKWARD, chunk, microbatch, pair)
