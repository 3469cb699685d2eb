"""A pipeline schedule: for each rank, its events in order, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum

from mindspeed_dsa.patches.errors import SettingsError


class Kind(str, Enum):
    """The computation of an event."""

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


Unit = tuple[Kind, int, int]
"""Kind, stage and microbatch: the name of an event among all ranks."""


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
        """Return the part of the model that a rank's chunk is."""
        if self.v_shaped and chunk % 2:
            return (chunk + 1) * len(self.ranks) - 1 - rank
        return chunk * len(self.ranks) + rank

    def rank_of(self, stage: int) -> int:
        """Return the rank that has a part of the model."""
        chunk, position = divmod(stage, len(self.ranks))
        return len(self.ranks) - 1 - position if self.v_shaped and chunk % 2 else position

    def next_unit(self, rank: int, event: Event) -> Unit | None:
        """Return the unit whose input a forward's or backward's result is; ``None`` at the model's ends."""
        stage = self.stage(rank, event.chunk) + (1 if event.kind is Kind.FORWARD else -1)
        return (event.kind, stage, event.microbatch) if 0 <= stage < self.stages else None

    def blocks(self, rank: int) -> Iterator[tuple[Event, ...]]:
        """Yield a rank's events, those of a pair together."""
        events = iter(self.ranks[rank])
        for event in events:
            yield (event,) if event.pair is None else (event, next(events))


@dataclass(frozen=True)
class Costs:
    """Costs of one chunk and microbatch, in any unit of time and any unit of memory.

    Attributes:
        forward: computation of a forward.
        input_gradient: of dX.
        weight_gradient: of dW.
        all_to_all_forward: dispatch and combine of a forward, alone on the link.
        all_to_all_backward: of a backward.
        p2p: from the end of an event to the start of the one that it feeds on another rank.
        between: from the end of an event to the start of the rank's next one, where that waits for nothing.
        recompute: of a forward that is recomputed.
        hidden_in_pairs: share of the all-to-all that a pair of independent events hides.
        hidden_alone: share that an event by itself hides, behind its shared expert and its weight gradients.
        activations: memory that a forward keeps for its backward.
        checkpoint: memory that it keeps where the backward recomputes it.
        weight_activations: share of ``activations`` that weight gradients still need once dX is done.
        measured: time of a kind of event in a stage, in place of everything above; of a backward without its
            weight gradients where these have a time of their own.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    all_to_all_forward: float = 0.0
    all_to_all_backward: float = 0.0
    p2p: float = 0.0
    between: float = 0.0
    recompute: float = 1.0
    hidden_in_pairs: float = 1.0
    hidden_alone: float = 0.0
    activations: float = 1.0
    checkpoint: float = 0.0
    weight_activations: float = 0.5
    measured: Mapping[tuple[Kind, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for cost in fields(self):
            value = getattr(self, cost.name)
            if isinstance(value, (int, float)) and not 0 <= value < float("inf"):
                raise SettingsError(f"schedule: {cost.name.replace('_', '-')} is {value}; give a number >= 0")
        for name in ("hidden_in_pairs", "hidden_alone", "weight_activations"):
            if getattr(self, name) > 1:
                raise SettingsError(f"schedule: {name.replace('_', '-')} is a share; give at most 1")

    def scaled(self, factor: float) -> Costs:
        """Return the costs of chunks that are ``factor`` times as large."""
        names = (
            "forward",
            "input_gradient",
            "weight_gradient",
            "all_to_all_forward",
            "all_to_all_backward",
            "recompute",
            "activations",
            "checkpoint",
        )
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def compute(self, kind: Kind, stage: int, split: bool) -> float:
        """Return the time of an event without its all-to-all; ``split``: without its weight gradients."""
        if (kind, stage) in self.measured:
            weights = self.measured.get((Kind.WEIGHT, stage), 0.0)
            return self.measured[kind, stage] + (weights if kind is Kind.BACKWARD and not split else 0.0)
        times = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.input_gradient + (0.0 if split else self.weight_gradient),
            Kind.WEIGHT: self.weight_gradient,
            Kind.RECOMPUTE: self.recompute,
        }
        return times[kind]

    def all_to_all(self, kind: Kind, stage: int) -> float:
        """Return the time of an event's transfers, alone on the link."""
        if (kind, stage) in self.measured:
            return 0.0
        times = {
            Kind.FORWARD: self.all_to_all_forward,
            Kind.BACKWARD: self.all_to_all_backward,
            Kind.RECOMPUTE: self.all_to_all_forward,
        }
        return times.get(kind, 0.0)
