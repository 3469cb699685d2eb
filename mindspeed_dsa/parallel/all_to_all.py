"""All-to-all split into a start and a wait, with other work between them in forward and in backward.

Autograd runs ready nodes in the reverse order of their creation. Work created between :func:`start` and
:meth:`InFlight.wait` therefore also runs between the two halves of the reverse transfer in backward: the node
of the wait launches it, and the node of the start waits for it.

If a graph is cut into pieces with separate backwards, use :func:`depart` and :meth:`InFlight.arrive` on the
two sides of a cut. The graph then carries no rows across the cut and keeps none for it.

Megatron's own all-to-all becomes one of the halves inside :func:`launching`, :func:`departing` and
:func:`arriving`. Inside :func:`departed` it only adds the node that waits for the gradient, and inside
:func:`returning` it does nothing.
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
"""Number of rows for each rank of the group, or ``None`` for equal numbers."""


class InFlight:
    """All-to-all in flight; made by :func:`start` or :func:`depart`, one per call."""

    def __init__(self, output_splits: Splits, input_splits: Splits, group: Any) -> None:
        self.forward: Pending | None = None
        self.backward: Pending | None = None
        self.received: Tensor | None = None
        # Sequence number of the start's node. Not the node itself, which refers to this object.
        self.place: int | None = None
        self._splits, self._group = (output_splits, input_splits), group
        self._name = names.current()

    def wait(self) -> Tensor:
        """Wait for the rows ``[sum(output_splits), ...]``. In backward, this launches the reverse transfer.

        Raises:
            RuntimeError: the transfer was already awaited.
        """
        return self.wait_and_mark()[0]

    def wait_and_mark(self) -> tuple[Tensor, Tensor]:
        """Wait as :meth:`wait`, and also return a mark ``[0]`` for the ``after`` of :func:`start`."""
        if self.received is None:
            raise RuntimeError(
                "this all-to-all was waited for already; use the rows which that wait returned"
            )
        received, self.received = self.received, None
        rows, mark = _Wait.apply(received, self)
        return rows, mark

    def arrive(self, edge: Tensor) -> Tensor:
        """Wait for the rows ``[sum(output_splits), ...]``. In backward, this launches the reverse transfer.

        Args:
            edge: result of :func:`depart`, ``[0]``, or a leaf that replaces it beyond a cut.
        """
        result: Tensor = _Arrive.apply(edge, self)
        return result

    def give_way(self, earlier: InFlight) -> None:
        """In backward, wait for this transfer only after the backward of all work since ``earlier``'s start.

        Work that depends on neither transfer then hides this one in backward, even if it hid the other one
        in forward.

        Args:
            earlier: transfer that was started before this one.
        """
        assert self.received is not None
        node = self.received.grad_fn
        if node is not None and earlier.place is not None:
            # Without sequence numbers the gradients are the same, but less is hidden.
            set_place = getattr(node, "_set_sequence_nr", None)
            if set_place is not None:
                set_place(earlier.place)

    def send(self, rows: Tensor, reverse: bool = False) -> Pending:
        """Launch a transfer of ``[sum(splits), ...]``; with ``reverse``, from receivers back to senders."""
        # In reverse, each rank sends back as many rows as it received.
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
    """Launch an all-to-all. All ranks of the group start the same ones in the same order.

    Args:
        rows: rows sorted by receiving rank, ``[sum(input_splits), ...]``; unchanged until the wait.
        output_splits: number of rows from each rank.
        input_splits: number of rows to each rank.
        group: process group.
        after: mark of an earlier transfer. In backward, that transfer is reversed only after this one has
            returned, regardless of :meth:`InFlight.give_way`.
    """
    flight = InFlight(output_splits, input_splits, group)
    flight.received = _Start.apply(rows, flight, after)
    place = getattr(flight.received.grad_fn, "_sequence_nr", None)
    if place is not None:
        flight.place = place()
    return flight


def depart(rows: Tensor, output_splits: Splits, input_splits: Splits, group: Any) -> tuple[Tensor, InFlight]:
    """Launch an all-to-all like :func:`start`, when the graph is cut before the wait.

    Returns:
        Edge ``[0]`` whose backward waits for the rows' gradient, and the transfer.
    """
    flight = InFlight(output_splits, input_splits, group)
    flight.forward = flight.send(rows)
    return _Depart.apply(rows, flight), flight


class _Depart(torch.autograd.Function):
    """Node of rows in flight or already sent; its backward waits for their gradient."""

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
        # The receive buffer, which is written until the wait.
        return flight.forward.result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None, Tensor | None]:
        pending, ctx.flight.backward = ctx.flight.backward, None
        # `token` is not read: the rows' gradient arrives by the transfer. The gradient of the mark `after`
        # makes autograd reach the wait node of the earlier transfer, which launches its reverse.
        return pending.wait(), None, token.new_empty(0) if ctx.needs_input_grad[2] else None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, flight: InFlight) -> tuple[Tensor, Tensor]:
        ctx.flight = flight
        assert flight.forward is not None
        flight.forward.wait()
        flight.forward = None
        # The second output is the mark for `after`.
        return received.view_as(received), received.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor, None]:
        ctx.flight.backward = ctx.flight.send(grad_output, reverse=True)
        # Autograd requires the gradient's shape to match the tensor's, but the returning rows have another
        # shape. This value is ignored by the start's node, which waits for the real gradient.
        return grad_output, None


# -- halves in place of Megatron's all-to-all ----------------------------------------------------

_Half = Callable[[Any, Tensor, Splits, Splits], Tensor]
_half: ContextVar[_Half | None] = ContextVar("half of an all-to-all", default=None)


def split_all_to_all(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap Megatron's ``all_to_all``: run only a half inside the contexts below."""

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
    """Start the all-to-alls of the block without waiting; they return their receive buffers.

    Args:
        flights: list that the transfers are appended to.
        after: mark of an earlier transfer; see :func:`start`.
    """

    def launch(group: Any, rows: Tensor, output_splits: Splits, input_splits: Splits) -> Tensor:
        flight = start(rows, output_splits, input_splits, group, after)
        flights.append(flight)
        assert flight.received is not None
        return flight.received

    return _inside(launch)


def departing(flights: list[InFlight]) -> AbstractContextManager[None]:
    """Start the all-to-alls of the block before a cut of the graph; they return an edge ``[0]``."""

    def launch(group: Any, rows: Tensor, output_splits: Splits, input_splits: Splits) -> Tensor:
        edge, flight = depart(rows, output_splits, input_splits, group)
        flights.append(flight)
        return edge

    return _inside(launch)


def departed(flights: list[InFlight]) -> AbstractContextManager[None]:
    """Skip the all-to-alls of the block, whose rows were sent before the recomputation.

    Args:
        flights: transfers of the first forward, in the same order; their gradients return through them.
    """

    def rejoin(group: Any, rows: Tensor, output_splits: Splits, input_splits: Splits) -> Tensor:
        edge: Tensor = _Depart.apply(rows, flights.pop(0))
        return edge

    return _inside(rejoin)


def arriving(flights: list[InFlight]) -> AbstractContextManager[None]:
    """Make the block's all-to-alls wait for the first of ``flights``; their input is the start's edge."""

    def arrive(group: Any, edge: Tensor, output_splits: Splits, input_splits: Splits) -> Tensor:
        return flights.pop(0).arrive(edge)

    return _inside(arrive)


def returning(rows: Tensor) -> AbstractContextManager[None]:
    """Make the block's all-to-all return rows that have already arrived."""
    return _inside(lambda *_: rows)
