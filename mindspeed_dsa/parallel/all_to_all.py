"""An all-to-all in two halves, start and wait, with room for other work between them in forward and backward.

Plain autograd runs ready nodes in the reverse order of their creation. What is created between :func:`start`
and :meth:`InFlight.wait` therefore runs in backward between the launch of the reverse transfer, by the node
of the wait, and the moment its result is needed, by the node of the start.

Where a graph is cut in pieces, each with a backward of its own, :func:`depart` and :meth:`InFlight.arrive`
are the two halves, on either side of a cut: no rows pass it in the graph, and none are kept for it.

Megatron's own all-to-all is one half inside of :func:`launching`, :func:`departing` and :func:`arriving`,
nothing but a place in the graph inside of :func:`departed`, and nothing at all inside of :func:`returning`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.parallel import names
from mindspeed_dsa.parallel.transfers import Pending

Splits = list[int] | None
"""Rows for each rank of the group, or ``None``: the same number for each."""


class InFlight:
    """Rows on their way; made by :func:`start`, one for each call."""

    def __init__(self, output_splits: Splits, input_splits: Splits, group: Any) -> None:
        self.forward: Pending | None = None
        self.backward: Pending | None = None
        self.received: Tensor | None = None
        self.place: int | None = None  # of the start's node among all; the node itself refers to this object
        self._splits, self._group = (output_splits, input_splits), group
        self._name = names.current()

    def wait(self) -> Tensor:
        """Return the rows, ``[sum(output_splits), ...]``; their gradient starts on the way back here.

        Raises:
            RuntimeError: it was waited for already.
        """
        return self.wait_and_mark()[0]

    def wait_and_mark(self) -> tuple[Tensor, Tensor]:
        """Wait as :meth:`wait`, and return ``[0]`` for a :func:`start` that comes first in backward."""
        if self.received is None:
            raise RuntimeError(
                "this all-to-all was waited for already; use the rows which that wait returned"
            )
        received, self.received = self.received, None
        rows, mark = _Wait.apply(received, self)
        return rows, mark

    def arrive(self, edge: Tensor) -> Tensor:
        """Return the rows, ``[sum(output_splits), ...]``; their gradient starts on the way back here.

        Args:
            edge: ``[0]``, what :func:`depart` returned, or a leaf that stands for it beyond a cut.
        """
        result: Tensor = _Arrive.apply(edge, self)
        return result

    def give_way(self, earlier: InFlight) -> None:
        """Wait for this transfer, in backward, only after all that forward did since ``earlier`` was started.

        Of that, what needs neither of the two transfers then runs under this one; so forward may do it under
        one transfer and backward under the other.
        """
        assert self.received is not None
        node = self.received.grad_fn
        if node is not None and earlier.place is not None:
            # Without it the gradients are the same, and less is hidden.
            set_place = getattr(node, "_set_sequence_nr", None)
            if set_place is not None:
                set_place(earlier.place)

    def send(self, rows: Tensor, reverse: bool = False) -> Pending:
        """Launch a transfer of ``[sum(splits), ...]``; with ``reverse``, from receivers to senders."""
        receive, send = reversed(self._splits) if reverse else self._splits
        rows = rows.contiguous()
        size = rows.size(0) if receive is None else sum(receive)
        result = rows.new_empty((size, *rows.shape[1:]))
        with names.under(self._name.reversed() if reverse else self._name):
            work = dist.all_to_all_single(result, rows, receive, send, group=self._group, async_op=True)
        return Pending(result, [work], [rows])


def start(
    rows: Tensor, output_splits: Splits, input_splits: Splits, group: Any, after: Tensor | None = None
) -> InFlight:
    """Launch an all-to-all; every rank of the group starts the same ones in the same order.

    Args:
        rows: ``[sum(input_splits), ...]``, by the rank that gets them; not to be changed before the wait.
        output_splits: rows from each rank.
        input_splits: rows to each rank.
        group: process group.
        after: mark of an earlier transfer. In backward its reverse is launched when that of this one has
            arrived, wherever :meth:`InFlight.give_way` has put that.
    """
    flight = InFlight(output_splits, input_splits, group)
    flight.received = _Start.apply(rows, flight, after)
    place = getattr(flight.received.grad_fn, "_sequence_nr", None)
    if place is not None:
        flight.place = place()
    return flight


def depart(rows: Tensor, output_splits: Splits, input_splits: Splits, group: Any) -> tuple[Tensor, InFlight]:
    """Launch one as :func:`start` does, where a cut of the graph lies between the two halves.

    Returns:
        ``[0]``, from which backward waits for the rows' gradient; and the rows on their way.
    """
    flight = InFlight(output_splits, input_splits, group)
    flight.forward = flight.send(rows)
    return _Depart.apply(rows, flight), flight


class _Depart(torch.autograd.Function):
    """Edge of rows that are on their way, or have arrived: backward waits for their gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: InFlight) -> Tensor:
        ctx.flight = flight
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None]:
        pending, ctx.flight.backward = ctx.flight.backward, None
        return pending.wait(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, flight: InFlight) -> Tensor:
        ctx.flight = flight
        pending, flight.forward = flight.forward, None
        assert pending is not None
        return pending.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        ctx.flight.backward = ctx.flight.send(grad_output, reverse=True)
        return grad_output.new_empty(0), None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: InFlight, after: Tensor | None) -> Tensor:
        ctx.flight = flight
        flight.forward = flight.send(rows)
        return flight.forward.result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None, Tensor | None]:
        pending, ctx.flight.backward = ctx.flight.backward, None
        return pending.wait(), None, token.new_empty(0) if ctx.needs_input_grad[2] else None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, flight: InFlight) -> tuple[Tensor, Tensor]:
        ctx.flight = flight
        assert flight.forward is not None
        flight.forward.wait()
        flight.forward = None
        return received.view_as(received), received.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor, None]:
        ctx.flight.backward = ctx.flight.send(grad_output, reverse=True)
        # Autograd checks that a gradient has its tensor's shape, and the rows on their way back have another.
        # This one only reaches the start's node, which waits for them.
        return grad_output, None


# -- inside of Megatron's steps -----------------------------------------------------------------

_Half = Callable[[Any, Tensor, Splits, Splits], Tensor]
_half: ContextVar[_Half | None] = ContextVar("half of an all-to-all", default=None)


def split_all_to_all(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate Megatron's ``all_to_all``."""

    def all_to_all(
        group: Any,
        input_: Tensor,
        output_split_sizes_: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        half = _half.get()
        if half is None:
            return original(group, input_, output_split_sizes_, input_split_sizes, *args, **kwargs)
        return half(group, input_, _splits(output_split_sizes_), _splits(input_split_sizes))

    return all_to_all


def _splits(sizes: Any) -> Splits:
    return None if sizes is None else [int(size) for size in sizes]


@contextmanager
def _inside(half: _Half) -> Iterator[None]:
    token = _half.set(half)
    try:
        yield
    finally:
        _half.reset(token)


def launching(flights: list[InFlight], after: Tensor | None = None) -> AbstractContextManager[None]:
    """Start the all-to-alls of the block: each is added to ``flights`` and returns the buffer of its rows.

    Args:
        flights: gets it.
        after: as for :func:`start`.
    """

    def launch(group: Any, rows: Tensor, output_splits: Splits, input_splits: Splits) -> Tensor:
        flight = start(rows, output_splits, input_splits, group, after)
        flights.append(flight)
        assert flight.received is not None
        return flight.received

    return _inside(launch)


def departing(flights: list[InFlight]) -> AbstractContextManager[None]:
    """Start them as :func:`launching` does, before a cut of the graph: ``[0]`` takes the buffer's place."""

    def launch(group: Any, rows: Tensor, output_splits: Splits, input_splits: Splits) -> Tensor:
        edge, flight = depart(rows, output_splits, input_splits, group)
        flights.append(flight)
        return edge

    return _inside(launch)


def departed(flights: list[InFlight]) -> AbstractContextManager[None]:
    """Send nothing in all-to-alls of the block: their rows were sent before they were computed again.

    Args:
        flights: of those transfers, in the same order; gradients come back by them.
    """

    def rejoin(group: Any, rows: Tensor, output_splits: Splits, input_splits: Splits) -> Tensor:
        edge: Tensor = _Depart.apply(rows, flights.pop(0))
        return edge

    return _inside(rejoin)


def arriving(flights: list[InFlight]) -> AbstractContextManager[None]:
    """Have all-to-alls of the block wait for the first of ``flights``; they get the ``[0]`` of its start."""

    def arrive(group: Any, edge: Tensor, output_splits: Splits, input_splits: Splits) -> Tensor:
        return flights.pop(0).arrive(edge)

    return _inside(arrive)


def returning(rows: Tensor) -> AbstractContextManager[None]:
    """Have the all-to-all of the block return rows that have arrived already."""
    return _inside(lambda *_: rows)
