"""Point-to-point messages of DualPipeV: activations and gradients to the next and the previous rank.

A message is sent when its event is done, without waiting for the receiver. The buffer is kept until a later
message from the receiver proves that the message was used. A rank posts its receives in the order in which
the sender sends, before the event that needs them. Both ends of a link therefore use the same message order,
and the step cannot deadlock if the simulated schedule does not. Backends other than gloo run a group's
messages one after the other, so each direction has its own process group.
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
    """Failure to exchange a message with another pipeline rank."""


class Groups:
    """Process groups of a session's pipelines, one per direction, created on first use."""

    def __init__(self) -> None:
        self._downward: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def of(self, pipeline: Any) -> tuple[Any, Any]:
        """Return the process groups for messages to the next and to the previous rank.

        Args:
            pipeline: pipeline parallel process group.
        """
        if dist.get_backend(pipeline) == "gloo":  # has a queue per direction and tag
            return pipeline, pipeline
        if pipeline not in self._downward:
            ranks = dist.get_process_group_ranks(pipeline)
            self._downward[pipeline] = subgroup(pipeline, ranks)
        return pipeline, self._downward[pipeline]


class Transfers:
    """Point-to-point messages of one rank in one step.

    Args:
        schedule: events of all ranks.
        groups: process groups for messages to the next and to the previous rank.
        shape: shape of an activation, ``[sequence, batch, hidden]``.
        dtype: dtype of an activation.
        device: device of an activation.
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
        neighbours = [rank for rank in (self.rank - 1, self.rank + 1) if 0 <= rank < len(schedule.ranks)]
        # Units whose input each neighbour is still to send, in its order.
        self._to_come = {sender: deque(self._sent_by(sender)) for sender in neighbours}
        # Posted receives, and results that stay on this rank.
        self._arriving: dict[Unit, tuple[Tensor, Any]] = {}
        self._here: dict[Unit, Tensor] = {}
        # Messages not known to be received, by receiver; and each unit's position in its list.
        self._leaving: dict[int, deque[_Sent]] = {rank: deque() for rank in neighbours}
        self._positions = {rank: dict(self._in_list_of(rank)) for rank in neighbours}

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
        """Return the event's unit if its input is a message, ``None`` if it starts from data or the loss."""
        if event.kind not in _TAGS:
            return None
        stage = self._schedule.stage(self.rank, event.chunk)
        begins = stage == (0 if event.kind is Kind.FORWARD else self._schedule.stages - 1)
        return None if begins else (event.kind, stage, event.microbatch)

    def _name(self, unit: Unit) -> Name:
        """Return the name of a unit's input message, for traces."""
        kind, stage, microbatch = unit
        # Stages PP to 2 PP - 1 are chunk 1.
        forward, chunk = kind is Kind.FORWARD, int(stage >= len(self._schedule.ranks))
        run = Pass(kind.name.lower(), microbatch, chunk)
        return Name("activation" if forward else "gradient", passes=(run,))

    def _sender(self, unit: Unit) -> int:
        return self._schedule.rank_of(unit[1] + (-1 if unit[0] is Kind.FORWARD else 1))

    def expect(self, events: Iterable[Event]) -> None:
        """Post the receives for the events, and for all messages that are sent before theirs."""
        for event in events:
            unit = self._needs(event)
            sender = None if unit is None else self._sender(unit)
            if sender is None or sender == self.rank:
                continue
            while unit in self._to_come[sender]:
                coming = self._to_come[sender].popleft()
                tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
                # Group 0 is for messages to higher ranks, group 1 to lower ranks.
                group = self._groups[self.rank < sender]
                with names.under(self._name(coming)):
                    work = dist.irecv(tensor, self._ranks[sender], group, _TAGS[coming[0]])
                self._arriving[coming] = tensor, work

    def take(self, event: Event) -> Tensor | None:
        """Wait for an event's input: an activation, or the gradient of its output.

        Returns:
            Input tensor, or ``None`` if the event starts from data or the loss.

        Raises:
            LostNeighbourError: the message does not arrive.
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
        # The message proves that the sender has run the unit before this one, with all its earlier inputs.
        kind, stage, microbatch = unit
        self._let_go(sender, (kind, stage + (-1 if kind is Kind.FORWARD else 1), microbatch))
        return tensor

    def _let_go(self, receiver: int, unit: Unit) -> None:
        """Free the messages that a receiver has used, because it has reached ``unit`` of its list."""
        # gloo reports that a message was received only in wait().
        sent, reached = self._leaving[receiver], self._positions[receiver][unit]
        while sent and self._positions[receiver][sent[0].unit] <= reached:
            self._wait_until_taken(receiver, sent.popleft())

    def hand_on(self, event: Event, result: Tensor) -> None:
        """Send an event's result: an activation, or the gradient of its input."""
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
        """Wait until all messages sent by this rank have been received.

        Raises:
            LostNeighbourError: a message is not received.
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
    """Message that was sent, and the unit that receives it."""

    unit: Unit
    tensor: Tensor
    work: Any


def _words(event: Event) -> str:
    return f"{event.kind.name.lower()} of chunk {event.chunk}, microbatch {event.microbatch}"
