"""Simulation of a schedule: the start and end of each event, from costs and dependencies."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.schedule.events import Costs, Event, Kind, Schedule, Unit


@dataclass(frozen=True)
class Span:
    """Time interval in which an event runs.

    Attributes:
        event: event that runs.
        rank: pipeline rank.
        start: start time, in the unit of the costs.
        end: end time; the events of a pair share both times.
        communication: all-to-all time of this event.
        hidden: part of ``communication`` that computation hides.
    """

    event: Event
    rank: int
    start: float
    end: float
    communication: float = 0.0
    hidden: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """A simulated or recorded step: the spans of each rank in order."""

    schedule: Schedule
    ranks: tuple[tuple[Span, ...], ...]

    @property
    def step_time(self) -> float:
        """Time from the start of the first event to the end of the last one, over all ranks."""
        return max(span.end for spans in self.ranks for span in spans) - min(
            span.start for spans in self.ranks for span in spans
        )


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate a schedule: each rank runs its events in order, as soon as their inputs have arrived.

    Raises:
        SettingsError: ranks deadlock, an event is missing or listed twice, or a receiver expects messages in
            another order than they are sent.
    """
    check_lists(schedule)
    simulation = _Simulation(schedule, costs)
    simulation.run()
    return Timeline(schedule, tuple(map(tuple, simulation.spans)))


class _Simulation:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        ranks = range(len(schedule.ranks))
        self.blocks = [list(schedule.blocks(rank)) for rank in ranks]
        self.next, self.free = [0 for _ in ranks], [0.0 for _ in ranks]
        self.spans: list[list[Span]] = [[] for _ in ranks]
        self.end: dict[Unit, float] = {}
        # WEIGHT units: the backward of the same stage and microbatch excludes its weight gradients.
        self.split = {self._unit(r, e) for r in ranks for e in schedule.ranks[r] if e.kind is Kind.WEIGHT}

    def _unit(self, rank: int, event: Event) -> Unit:
        return event.kind, self.schedule.stage(rank, event.chunk), event.microbatch

    def run(self) -> None:
        """Run every rank until an input is missing; the event that provides the input resumes the rank."""
        waiting: dict[Unit, list[int]] = defaultdict(list)
        ready = deque(range(len(self.blocks)))
        while ready:
            rank = ready.popleft()
            while self.next[rank] < len(self.blocks[rank]):
                block = self.blocks[rank][self.next[rank]]
                missing = next((unit for unit in self._needs(rank, block) if unit not in self.end), None)
                if missing is not None:
                    waiting[missing].append(rank)
                    break
                self._place(rank, block)
                self.next[rank] += 1
                for event in block:
                    ready.extend(waiting.pop(self._unit(rank, event), ()))
        if waiting:
            stuck = [
                f"rank {rank} waits for {unit[0].value} of stage {unit[1]}, microbatch {unit[2]}, before "
                f"{self.blocks[rank][self.next[rank]][0]}"
                for unit, ranks in waiting.items()
                for rank in ranks
            ]
            raise SettingsError(f"schedule {self.schedule.name!r} deadlocks: " + "; ".join(sorted(stuck)))

    def _needs(self, rank: int, block: tuple[Event, ...]) -> list[Unit]:
        """Return the inputs that a block waits for, except outputs of its own events."""
        own_units = {self._unit(rank, event) for event in block}
        return [unit for event in block for unit in self._before(rank, event) if unit not in own_units]

    def _before(self, rank: int, event: Event) -> list[Unit]:
        kind, stage, microbatch = self._unit(rank, event)
        last = stage == self.schedule.stages - 1
        gradient = [] if last else [(Kind.BACKWARD, stage + 1, microbatch)]
        if kind is Kind.FORWARD:
            return [(kind, stage - 1, microbatch)] if stage else []
        if kind is Kind.BACKWARD:
            return [(Kind.FORWARD, stage, microbatch), *gradient]
        if kind is Kind.WEIGHT:
            return [(Kind.BACKWARD, stage, microbatch)]
        return [(Kind.FORWARD, stage, microbatch), *([] if event.ahead else gradient)]

    def _place(self, rank: int, block: tuple[Event, ...]) -> None:
        start = max([self.free[rank], *(self._arrival(rank, unit) for unit in self._needs(rank, block))])
        compute, communication = [], []
        for event in block:
            unit = self._unit(rank, event)
            split = (Kind.WEIGHT, *unit[1:]) in self.split
            compute.append(self.costs.compute(event.kind, unit[1], split))
            communication.append(self.costs.all_to_all(event.kind, unit[1]))
        independent = len(block) > 1 and not any(
            unit == self._unit(rank, block[0]) for unit in self._before(rank, block[1])
        )
        # A pair of a forward and its own backward is sequential and hides no more than single events.
        share = self.costs.hidden_in_pairs if independent else self.costs.hidden_alone
        # Computation hides at most its own duration.
        hidden = min(share * sum(communication), sum(compute))
        end = start + sum(compute) + sum(communication) - hidden
        for event, transfer in zip(block, communication, strict=True):
            part = hidden * transfer / sum(communication) if sum(communication) else 0.0
            self.spans[rank].append(Span(event, rank, start, end, transfer, part))
            self.end[self._unit(rank, event)] = end
        self.free[rank] = end + self.costs.between

    def _arrival(self, rank: int, unit: Unit) -> float:
        return self.end[unit] + (self.costs.p2p if self.schedule.rank_of(unit[1]) != rank else 0.0)


def check_lists(schedule: Schedule) -> None:
    """Check that every forward and backward runs exactly once, and that message orders match.

    A schedule without any backward is checked for forwards only.

    Raises:
        SettingsError: a check fails; the message names the rank.
    """
    backward = any(event.kind is Kind.BACKWARD for events in schedule.ranks for event in events)
    kinds = {Kind.FORWARD, Kind.BACKWARD} if backward else {Kind.FORWARD}
    wanted = {
        (kind, chunk, microbatch)
        for kind in kinds
        for chunk in range(schedule.chunks)
        for microbatch in range(schedule.microbatches)
    }
    for rank, events in enumerate(schedule.ranks):
        listed = [(e.kind, e.chunk, e.microbatch) for e in events if e.kind in (Kind.FORWARD, Kind.BACKWARD)]
        if len(listed) != len(set(listed)) or set(listed) != wanted:
            raise SettingsError(
                f"schedule {schedule.name!r}: rank {rank} does not run every chunk of every microbatch once"
            )
    for key, (sent, expected) in _messages(schedule).items():
        if sent != expected:
            raise SettingsError(
                f"schedule {schedule.name!r}: rank {key[0]} sends rank {key[1]} its messages in another "
                "order than that rank expects them, so they would be mixed up or hang"
            )


def _messages(schedule: Schedule) -> dict[tuple[int, int, Kind], tuple[list[Unit], list[Unit]]]:
    """Return a dict from (sender, receiver, direction) to the messages in sent and in expected order."""
    messages: dict[tuple[int, int, Kind], tuple[list[Unit], list[Unit]]] = defaultdict(lambda: ([], []))
    for rank, events in enumerate(schedule.ranks):
        for event in events:
            if event.kind not in (Kind.FORWARD, Kind.BACKWARD):
                continue
            stage = schedule.stage(rank, event.chunk)
            step = 1 if event.kind is Kind.FORWARD else -1
            for other, side in ((stage + step, 0), (stage - step, 1)):
                if 0 <= other < schedule.stages and schedule.rank_of(other) != rank:
                    ends = (rank, schedule.rank_of(other)) if side == 0 else (schedule.rank_of(other), rank)
                    receiver = other if side == 0 else stage
                    messages[(*ends, event.kind)][side].append((event.kind, receiver, event.microbatch))
    return messages
