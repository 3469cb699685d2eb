"""Tensors that pass along chains of ranks, in pieces: each rank receives a piece and passes it on.

A link carries a tensor once in each direction, however many ranks receive it. A :class:`Flow` either copies
the first rank's tensors to all others, or sums all ranks' tensors on the way to the last rank, in the order
of the chain.

Messages are ordered by rounds: rank ``j`` of a chain sends piece ``p`` in round ``p + j``. Both ranks of a
link start its messages in the order of rounds, then of flows. So several chains in opposite directions cannot
deadlock.

On CPUs, a thread passes pieces on while the caller computes. On devices, all messages are enqueued at once on
a separate stream, and the host does not wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa import platforms
from mindspeed_dsa.parallel.names import named
from mindspeed_dsa.parallel.transfers import bounds

_PIECES_PER_HOP, _MOST_PIECES, _LEAST_BYTES = 8, 64, 256 << 10
_TAG = 1 << 9
"""Tag of all messages, apart from tags of other messages. The order tells messages of one link apart."""


def pieces_of(hops: int, nbytes: int) -> int:
    """Return the number of pieces in which tensors pass along a chain, at least 1.

    All tensors have passed after the time of ``pieces + hops - 1`` pieces on one link.

    Args:
        hops: number of ranks that receive.
        nbytes: size of all tensors in bytes.
    """
    if hops == 1:
        return 1
    # 3 hops and 16 pieces: 18 / 16 of the time of one hop. Smaller pieces cost more time in messages.
    return max(1, min(_PIECES_PER_HOP * (hops - 1), _MOST_PIECES, nbytes // _LEAST_BYTES))


@dataclass
class Flow:
    """Tensors that pass along a chain. All ranks of the group list the same flows in the same order.

    Attributes:
        ranks: ranks of the group in the order of the chain, at least two.
        content: name of the tensors, for messages and errors.
        sizes: number of elements of each tensor.
        itemsize: bytes per element.
        own: this rank's tensors, contiguous. The first rank sends them. Other ranks add received
            tensors to them, and send the sum. Empty: the rank sends the received tensors.
        received: contiguous receive buffers; empty on the first rank.
    """

    ranks: tuple[int, ...]
    content: str
    sizes: Sequence[int]
    itemsize: int
    own: Sequence[Tensor] = ()
    received: Sequence[Tensor] = ()

    @cached_property
    def pieces(self) -> list[tuple[int, int, int]]:
        """Number of the tensor, first element, and end of each piece."""
        total = sum(self.sizes)
        count = pieces_of(len(self.ranks) - 1, total * self.itemsize)
        # 24 pieces of 2 weights of 200 and 100 elements: 16 pieces and 8.
        return [
            (number, *edges)
            for number, size in enumerate(self.sizes)
            for edges in bounds(size, round(count * size / total))
        ]

    def incoming(self, piece: int) -> Tensor:
        """Return the part ``[elements]`` of the buffers that receives a piece."""
        return self._part(self.received, piece)

    def outgoing(self, piece: int) -> Tensor:
        """Return the elements ``[elements]`` of a piece as this rank sends them."""
        return self._part(self.own or self.received, piece)

    def _part(self, tensors: Sequence[Tensor], piece: int) -> Tensor:
        number, start, stop = self.pieces[piece]
        return tensors[number].view(-1)[start:stop]

    @property
    def adds(self) -> bool:
        """Whether this rank adds received tensors to its own."""
        return bool(self.own and self.received)


class _Message(NamedTuple):
    """Message of this rank. Sorted by round, then by flow."""

    round: int
    flow: int
    piece: int
    sends: bool
    peer: int


class Chains:
    """Flows of one batch: ``launch``, ``arrive``, ``settle``.

    Args:
        flows: flows of the group, equal on all ranks except for their tensors.
        group: process group.
        lane: lane of all batches of the group that may be in flight at once; default: a new one.
    """

    def __init__(self, flows: Sequence[Flow], group: ProcessGroup, lane: Lane | None = None) -> None:
        self._flows, self._group, self._lane = flows, group, lane or Lane()
        self._messages = _messages(flows, group) if flows else []
        self._incoming: dict[tuple[int, int], Any] = {}
        self._sent: list[tuple[str, Any, Tensor]] = []
        self._job: _Job | None = None
        self._done: Any = None

    def launch(self) -> None:
        """Start all messages. All ranks of the group launch their batches in the same order."""
        if not self._messages:
            return
        if platforms.current().asynchronous:
            self._enqueue()
            return
        # Receives first: gloo completes a send only after its receive is announced.
        for message in self._messages:
            if not message.sends:
                self._incoming[message.flow, message.piece] = self._start(message)
        sends = [message for message in self._messages if message.sends]
        if sends and (self._lane.busy() or any(self._flows[message.flow].received for message in sends)):
            self._job = self._lane.submit(lambda: self._send(sends))
        else:
            self._send(sends)

    def arrive(self) -> None:
        """Wait until this rank has received everything. On devices, the current stream waits."""
        if self._done is not None:
            platforms.current().current_stream().wait_event(self._done)
        if self._job is not None:
            self._job.wait()
        for flow, piece in list(self._incoming):
            self._finish(flow, piece)

    def settle(self) -> None:
        """Wait until this rank has received and sent everything. Later calls do nothing."""
        self.arrive()
        while self._sent:
            what, work, _ = self._sent.pop()
            with _lost(what):
                work.wait()
        self._flows, self._messages, self._job = (), [], None

    # -- CPUs -------------------------------------------------------------------------------------

    def _start(self, message: _Message) -> Any:
        flow = self._flows[message.flow]
        with named(flow.content), _lost(flow.content):
            if message.sends:
                return dist.isend(flow.outgoing(message.piece), message.peer, self._group, _TAG)
            return dist.irecv(flow.incoming(message.piece), message.peer, self._group, _TAG)

    def _send(self, sends: Sequence[_Message]) -> None:
        """Send pieces in order, each after it has arrived."""
        for message in sends:
            if (message.flow, message.piece) in self._incoming:
                self._finish(message.flow, message.piece)
            flow = self._flows[message.flow]
            # gloo cancels a send whose handle is dropped.
            self._sent.append((flow.content, self._start(message), flow.outgoing(message.piece)))

    def _finish(self, number: int, piece: int) -> None:
        """Wait for a piece, and add it to this rank's own."""
        flow = self._flows[number]
        with _lost(flow.content):
            self._incoming.pop((number, piece)).wait()
        if flow.adds:
            total = flow.outgoing(piece).numpy()
            # torch would start a team of threads for the thread that adds.
            np.add(total, flow.incoming(piece).numpy(), out=total)

    # -- devices ----------------------------------------------------------------------------------

    def _enqueue(self) -> None:
        platform, stream = platforms.current(), self._lane.stream
        stream.wait_stream(platform.current_stream())
        with platform.use_stream(stream):
            for _, messages in groupby(self._messages, key=attrgetter("round")):
                self._enqueue_round(list(messages))
            self._done = platform.new_event()
            self._done.record(stream)
        for flow in self._flows:
            for tensor in (*flow.own, *flow.received):
                platform.record_stream(tensor, stream)

    def _enqueue_round(self, messages: Sequence[_Message]) -> None:
        flows = [self._flows[message.flow] for message in messages]
        operations = [
            dist.P2POp(dist.isend, flow.outgoing(message.piece), message.peer, self._group)
            if message.sends
            else dist.P2POp(dist.irecv, flow.incoming(message.piece), message.peer, self._group)
            for flow, message in zip(flows, messages, strict=True)
        ]
        with named(", ".join(dict.fromkeys(flow.content for flow in flows))):
            works = dist.batch_isend_irecv(operations)
        for work in works:
            work.wait()  # of the stream, not of the host
        for flow, message in zip(flows, messages, strict=True):
            if flow.adds and not message.sends:
                flow.outgoing(message.piece).add_(flow.incoming(message.piece))


def _messages(flows: Sequence[Flow], group: ProcessGroup) -> list[_Message]:
    """Return this rank's messages in their order."""
    rank, peers = dist.get_rank(group), dist.get_process_group_ranks(group)
    messages = []
    for number, flow in enumerate(flows):
        if rank not in flow.ranks:
            continue
        place = flow.ranks.index(rank)
        for piece in range(len(flow.pieces)):
            if place > 0:
                before = peers[flow.ranks[place - 1]]
                messages.append(_Message(piece + place - 1, number, piece, False, before))
            if place + 1 < len(flow.ranks):
                after = peers[flow.ranks[place + 1]]
                messages.append(_Message(piece + place, number, piece, True, after))
    return sorted(messages)


@contextlib.contextmanager
def _lost(content: str) -> Iterator[None]:
    """Context that names the chain in errors of its messages."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{content}: {error}; a rank of this chain has ended or hangs: see the ends of their logs, or "
            "run again with --record-collectives"
        ) from error


# -- threads and streams -----------------------------------------------------------------------


class _Job:
    """Work of a lane's thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        # The names of the microbatch and layer are context variables.
        self._run, self._work = copy_context().run, work
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work; keep an error for :meth:`wait`."""
        try:
            self._run(self._work)
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> None:
        """Wait until the work is done, and raise its error."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class Lane:
    """Order of the messages of one group: a thread on CPUs, a stream on devices."""

    def __init__(self) -> None:
        self._jobs: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._works = False

    @cached_property
    def stream(self) -> Any:
        """Stream of the messages."""
        return platforms.current().new_stream()

    def busy(self) -> bool:
        """Return whether jobs are unfinished, after which new messages have to wait."""
        with self._lock:
            return self._works

    def submit(self, work: Callable[[], None]) -> _Job:
        """Run ``work`` in the lane's thread, after all earlier work."""
        job = _Job(work)
        with self._lock:
            self._jobs.append(job)
            if not self._works:
                self._works = True
                threading.Thread(target=self._run, name="chains of ranks", daemon=True).start()
        return job

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._works = False
                    return
                job = self._jobs.popleft()
            job.run()
