"""Pipeline schedule: the ordered events of each rank, and their costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum

from mindspeed_dsa.patches.errors import SettingsError


class Kind(str, Enum):
    """Kind of computation in a pipeline; the last five are parts of one layer's step."""

    FORWARD = "F"
    BACKWARD = "B"
    """Input gradients, and weight gradients too if the list has no :attr:`WEIGHT` of the same unit."""
    WEIGHT = "W"
    """Weight gradients."""
    RECOMPUTE = "R"
    """Recomputation of a forward, which its backward needs."""
    DISPATCH = "D"
    """All-to-all from router to experts, or of its gradients."""
    COLD = "E"
    """Experts of dispatched tokens."""
    HOT = "H"
    """Moved experts on the rank's own tokens."""
    PASSED = "P"
    """Weights of moved experts on their way along a chain, or gradients on their way back."""
    COMBINE = "C"
    """All-to-all from experts back, or of its gradients."""


@dataclass(frozen=True)
class Event:
    """One event in a rank's schedule: a forward, a backward, weight gradients or a recomputation.

    Attributes:
        kind: kind of computation.
        chunk: index of the model chunk on this rank.
        microbatch: index of the microbatch in the step.
        pair: number of the pair, if a forward and a backward run together and hide each other's
            communication. ``None``: the event runs by itself.
        ahead: whether this recomputation may run before the gradient for its backward arrives.
    """

    kind: Kind
    chunk: int
    microbatch: int
    pair: int | None = None
    ahead: bool = False

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.microbatch}"


Unit = tuple[Kind, int, int]
"""Kind, stage and microbatch; identifies an event among all ranks."""


@dataclass(frozen=True)
class Schedule:
    """Ordered events of all pipeline ranks.

    Attributes:
        name: name of the schedule.
        ranks: events of each pipeline rank, in order.
        chunks: number of model chunks per rank.
        microbatches: number of microbatches per step.
        v_shaped: whether odd chunks are assigned to the ranks in reverse order, as in DualPipeV. Otherwise
            chunks are interleaved as in Megatron.
    """

    name: str
    ranks: tuple[tuple[Event, ...], ...]
    chunks: int
    microbatches: int
    v_shaped: bool = False

    @property
    def stages(self) -> int:
        """Number of pipeline stages, over all ranks and chunks."""
        return len(self.ranks) * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage number of a rank's chunk."""
        # 4 ranks, chunk 1 of rank 0: stage 7 in a V, stage 4 if interleaved.
        if self.v_shaped and chunk % 2:
            return (chunk + 1) * len(self.ranks) - 1 - rank
        return chunk * len(self.ranks) + rank

    def rank_of(self, stage: int) -> int:
        """Return the rank that runs a stage."""
        chunk, position = divmod(stage, len(self.ranks))
        return len(self.ranks) - 1 - position if self.v_shaped and chunk % 2 else position

    def next_unit(self, rank: int, event: Event) -> Unit | None:
        """Return the unit that consumes the event's output, or ``None`` at the model's ends."""
        stage = self.stage(rank, event.chunk) + (1 if event.kind is Kind.FORWARD else -1)
        return (event.kind, stage, event.microbatch) if 0 <= stage < self.stages else None

    def blocks(self, rank: int) -> Iterator[tuple[Event, ...]]:
        """Yield a rank's events in order, as tuples: two for a pair, otherwise one."""
        events = iter(self.ranks[rank])
        for event in events:
            yield (event,) if event.pair is None else (event, next(events))


@dataclass(frozen=True)
class Costs:
    """Time and memory of one chunk's work on one microbatch, in any units.

    Attributes:
        forward: compute time of a forward.
        input_gradient: time of computing dX.
        weight_gradient: time of computing dW.
        all_to_all_forward: communication time of a forward's dispatch and combine, if nothing else uses the
            link.
        all_to_all_backward: communication time of a backward's dispatch and combine, if nothing else uses the
            link.
        p2p: delay from the end of an event to the start of the dependent event on another rank.
        between: host delay from the end of an event to the start of the rank's next one, if its inputs are
            ready.
        recompute: time to recompute a forward.
        hidden_in_pairs: fraction of the all-to-all time hidden when a forward and a backward run as a pair.
        hidden_alone: fraction hidden in an unpaired event, by its own shared expert and weight gradients.
        activations: memory that a forward keeps for its backward.
        checkpoint: memory that a forward keeps if the backward recomputes it.
        weight_activations: fraction of ``activations`` that weight gradients need after dX is computed.
        measured: dict from (kind, stage) to measured time, which replaces the computed times above. If it
            contains weight gradients, the backward times exclude them.
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
        """Return the costs for chunks that are ``factor`` times as large."""
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
        """Return an event's compute time. With ``split``, a backward excludes its weight gradients."""
        if (kind, stage) in self.measured:
            # A measured backward excludes weight gradients that are measured separately.
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
        """Return the time of an event's all-to-alls, if nothing else uses the link."""
        # Measured times include transfers.
        if (kind, stage) in self.measured:
            return 0.0
        times = {
            Kind.FORWARD: self.all_to_all_forward,
            Kind.BACKWARD: self.all_to_all_backward,
            Kind.RECOMPUTE: self.all_to_all_forward,
        }
        return times.get(kind, 0.0)
