"""A pipeline schedule: for each rank, what it does and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """Kind of work that an event does."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs, and of weights where no :attr:`WEIGHT` of the same unit stands in the list."""
    WEIGHT = "W"
    """Gradients of weights."""
    RECOMPUTE = "R"
    """The forward again, which its backward needs."""


@dataclass(frozen=True)
class Event:
    """One unit of work of a rank.

    Attributes:
        kind: what it computes.
        chunk: of the model, as the rank numbers its own.
        microbatch: its number in the step.
        pair: number of the block which a forward and a backward share, their communication hidden behind
            each other's computation; ``None`` where it stands alone.
        ahead: of a recomputation: it may run before its gradient is there.
    """

    kind: Kind
    chunk: int
    microbatch: int
    pair: int | None = None
    ahead: bool = False

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """All ranks' events.

    Attributes:
        name: of the schedule.
        ranks: for each pipeline rank, its events in order.
        chunks: model chunks per rank.
        microbatches: in one step.
        v_shaped: chunk 1 lies on the ranks in reverse order, as in DualPipeV; else chunks are interleaved.
    """

    name: str
    ranks: tuple[tuple[Event, ...], ...]
    chunks: int
    microbatches: int
    v_shaped: bool = False

    @property
    def stages(self) -> int:
        """Number of parts of the model, in the order in which a microbatch passes them."""
        return len(self.ranks) * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Which part of the model a rank's chunk is."""
        if self.v_shaped and chunk % 2:
            return (chunk + 1) * len(self.ranks) - 1 - rank
        return chunk * len(self.ranks) + rank

    def rank_of(self, stage: int) -> int:
        """The rank that has a part of the model."""
        chunk, position = divmod(stage, len(self.ranks))
        return len(self.ranks) - 1 - position if self.v_shaped and chunk % 2 else position

    def blocks(self, rank: int) -> Iterator[tuple[Event, ...]]:
        """A rank's events, those of a pair together."""
        events = iter(self.ranks[rank])
        for event in events:
            yield (event,) if event.pair is None else (event, next(events))
