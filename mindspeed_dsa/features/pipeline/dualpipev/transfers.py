"""Messages between the ranks of a V: activations and gradients, to the rank above and to the rank below.

Every message leaves when its event is done, and nobody waits for it to be taken; it stays in memory until
one comes from its receiver that was sent later than that has used it. A rank posts its receives in
the order in which the sender's list sends, ahead of the event that needs them. So all messages from one rank
to another are one queue, in one order on both ends, and ranks wait for each other as in the simulation: it
cannot deadlock. Where a backend runs all of a group's messages one after the other, each direction gets a
group of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.parallel import names
from mindspeed_dsa.parallel.groups import subgroup
from mindspeed_dsa.parallel.names import Name, Pass
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.schedule.events import Event, Kind, Schedule, Unit

_TAGS = {Kind.FORWARD: 1, Kind.BACKWARD: 2}


class LostNeighbourError(MindSpeedDSAError):
    """A message that did not arrive, or was not taken."""


class Groups:
    """Process groups of a session's pipelines by direction, made on first use."""

    def __init__(self) -> None:
        self._downward: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def of(self, pipeline: Any) -> tuple[Any, Any]:
        """Return the groups for messages to ranks of higher and of lower number.

        Args:
            pipeline: process group.
        """
        if dist.get_backend(pipeline) == "gloo":  # which has queues for each direction and tag
            return pipeline, pipeline
        if pipeline not in self._downward:
            ranks = dist.get_process_group_ranks(pipeline)
            self._downward[pipeline] = subgroup(pipeline, ranks)
        return pipeline, self._downward[pipeline]


class Transfers:
    """Messages of one rank in one step.

    Args:
        schedule: all ranks' lists.
        groups: for messages to higher and to lower ranks.
        shape: of an activation, ``[sequence, batch, hidden]``.
        dtype: of it.
        device: of it.
    """

    def __init__(
        self,
        schedule: Schedule,
        groups: tuple[Any, Any],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._schedule, self._groups, self.rank = schedule, groups, groups[0].rank()
        self._shape, self._dtype, self._device = shape, dtype, device
        self._ranks = dist.get_process_group_ranks(groups[0])
        neighbours = [each for each in (self.rank - 1, self.rank + 1) if 0 <= each < len(schedule.ranks)]
        self._to_come = {sender: deque(self._sent_by(sender)) for sender in neighbours}
        self._arriving: dict[Unit, tuple[Tensor, Any]] = {}
        self._here: dict[Unit, Tensor] = {}
        self._leaving: dict[int, deque[_Sent]] = {each: deque() for each in neighbours}
        self._positions = {each: dict(self._in_list_of(each)) for each in neighbours}

    def _in_list_of(self, rank: int) -> Iterable[tuple[Unit, int]]:
        for position, event in enumerate(self._schedule.ranks[rank]):
            yield (event.kind, self._schedule.stage(rank, event.chunk), event.microbatch), position

    def _sent_by(self, sender: int) -> Iterable[Unit]:
        for event in self._schedule.ranks[sender]:
            unit = self._leads_to(sender, event)
            if unit is not None and self._schedule.rank_of(unit[1]) == self.rank:
                yield unit

    def _leads_to(self, rank: int, event: Event) -> Unit | None:
        return self._schedule.next_unit(rank, event) if event.kind in _TAGS else None

    def _needs(self, event: Event) -> Unit | None:
        """Return the unit of an event that gets a message; None where it begins with data or loss."""
        if event.kind not in _TAGS:
            return None
        stage = self._schedule.stage(self.rank, event.chunk)
        begins = stage == (0 if event.kind is Kind.FORWARD else self._schedule.stages - 1)
        return None if begins else (event.kind, stage, event.microbatch)

    def _name(self, unit: Unit) -> Name:
        """Return the name of what a unit begins with."""
        kind, stage, microbatch = unit
        forward, chunk = kind is Kind.FORWARD, int(stage >= len(self._schedule.ranks))
        run = Pass(kind.name.lower(), microbatch, chunk)
        return Name("activation" if forward else "gradient", passes=(run,))

    def _sender(self, unit: Unit) -> int:
        return self._schedule.rank_of(unit[1] + (-1 if unit[0] is Kind.FORWARD else 1))

    def expect(self, events: Iterable[Event]) -> None:
        """Post the receives of events, and those that leave their senders before them."""
        for event in events:
            unit = self._needs(event)
            sender = None if unit is None else self._sender(unit)
            if sender is None or sender == self.rank:
                continue
            while unit in self._to_come[sender]:
                coming = self._to_come[sender].popleft()
                tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
                group = self._groups[self.rank < sender]
                with names.under(self._name(coming)):
                    work = dist.irecv(tensor, self._ranks[sender], group, _TAGS[coming[0]])
                self._arriving[coming] = tensor, work

    def take(self, event: Event) -> Tensor | None:
        """Return an event's input, an activation or the gradient of its output, once it is there.

        Raises:
            LostNeighbourError: it does not come.
        """
        unit = self._needs(event)
        if unit is None:
            return None
        if unit in self._here:
            return self._here.pop(unit)
        tensor, work = self._arriving.pop(unit)
        sender = self._sender(unit)
        try:
            work.wait()
        except RuntimeError as error:
            raise LostNeighbourError(
                f"dualpipev: pipeline rank {self.rank} waits for rank {sender}, which is lost, before "
                f"{_words(event)} (stage {unit[1]}): {error}"
            ) from error
        kind, stage, microbatch = unit
        self._let_go(sender, (kind, stage + (-1 if kind is Kind.FORWARD else 1), microbatch))
        return tensor

    def _let_go(self, receiver: int, unit: Unit) -> None:
        """Drop what a rank has taken, as it has come to a unit of its list: gloo says so at a wait alone."""
        sent, reached = self._leaving[receiver], self._positions[receiver][unit]
        while sent and self._positions[receiver][sent[0].unit] <= reached:
            self._wait_until_taken(receiver, sent.popleft())

    def hand_on(self, event: Event, result: Tensor) -> None:
        """Send an event's result, an activation or the gradient of its input, to where it is needed."""
        unit = self._leads_to(self.rank, event)
        if unit is None:
            return
        receiver, alias = self._schedule.rank_of(unit[1]), result.detach()
        if receiver == self.rank:
            self._here[unit] = alias
            return
        alias = alias.contiguous()
        group = self._groups[receiver < self.rank]
        with names.under(self._name(unit)):
            work = dist.isend(alias, self._ranks[receiver], group, _TAGS[event.kind])
        self._leaving[receiver].append(_Sent(unit, alias, work))

    def finish(self) -> None:
        """Wait until everything that was sent has been taken.

        Raises:
            LostNeighbourError: it is not.
        """
        for receiver, sent in self._leaving.items():
            while sent:
                self._wait_until_taken(receiver, sent.popleft())

    def _wait_until_taken(self, receiver: int, sent: _Sent) -> None:
        try:
            if not sent.work.is_completed():  # a second wait on a gloo send never returns
                sent.work.wait()
        except RuntimeError as error:
            kind, stage, microbatch = sent.unit
            raise LostNeighbourError(
                f"dualpipev: pipeline rank {self.rank} has sent what {kind.name.lower()} of stage {stage}, "
                f"microbatch {microbatch}, begins with to rank {receiver}, which is lost: {error}"
            ) from error


class _Sent(NamedTuple):
    """A message under way: the unit whose input it is, and what is sent."""

    unit: Unit
    tensor: Tensor
    work: Any


def _words(event: Event) -> str:
    return f"{event.kind.name.lower()} of chunk {event.chunk}, microbatch {event.microbatch}"
