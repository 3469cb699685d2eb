"""All-to-all split into a start and a wait, so that other work overlaps with it in forward and backward.

In backward, the autograd node of :meth:`InFlight.wait` launches the reverse all-to-all, and the node of
:func:`start` waits for it. Autograd runs ready nodes in the reverse order of their creation. Work between the
start and the wait in forward therefore overlaps with the transfer in backward too.

A graph can also be cut into parts that run backward separately. For an all-to-all across a cut, use
:func:`depart` before it and :meth:`InFlight.arrive` after it. Only an empty tensor then connects the two
parts, and neither part keeps the transferred rows.

The contexts below change Megatron's own all-to-all. Inside :func:`launching` and :func:`departing` it starts
without waiting. Inside :func:`arriving` it waits without starting. Inside :func:`departed` it sends nothing,
but adds the autograd node that waits for the gradient. Inside :func:`returning` it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    """All-to-all in flight, created by :func:`start` or :func:`depart`."""

    def __init__(self, output_splits: Splits, input_splits: Splits, group: Any) -> None:
        self.forward: Pending | None = None
        self.backward: Pending | None = None
        self.received: Tensor | None = None
        # Sequence number of the start's node. Not the node itself, which refers to this object.
        self.place: int | None = None
        self._splits, self._group = (output_splits, input_splits), group
        self._name = names.current()

    def wait(self) -> Tensor:
        """Wait for the transfer. Backward launches the reverse transfer.

        Returns:
            Received rows, ``[sum(output_splits), ...]``.

        Raises:
            RuntimeError: this was called before.
        """
        return self.wait_and_mark()[0]

    def wait_and_mark(self) -> tuple[Tensor, Tensor]:
        """Like :meth:`wait`, but also return a mark ``[0]``, for the ``after`` argument of :func:`start`."""
        if self.received is None:
            raise RuntimeError(
                "this all-to-all was waited for already; use the rows which that wait returned"
            )
        received, self.received = self.received, None
        rows, mark = _Wait.apply(received, self)
        return rows, mark

    def arrive(self, edge: Tensor) -> Tensor:
        """Wait for the transfer after a cut of the graph. Backward launches the reverse transfer.

        Args:
            edge: result of :func:`depart`, ``[0]``, or the leaf tensor that replaces it after a cut of the
                graph.

        Returns:
            Received rows, ``[sum(output_splits), ...]``.
        """
        result: Tensor = _Arrive.apply(edge, self)
        return result

    def give_way(self, earlier: InFlight) -> None:
        """Wait for this transfer in backward only after the work since ``earlier``'s start has run backward.

        Work that depends on neither transfer then overlaps with this one in backward, even if it overlapped
        with ``earlier`` in forward.

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
        """Launch a transfer of ``[sum(splits), ...]``, or with ``reverse`` back to the senders."""
        # In reverse, each rank sends back as many rows as it received.
        receive, send = reversed(self._splits) if reverse else self._splits
        rows = rows.contiguous()
        size = rows.size(0) if receive is None else sum(receive)
        result = rows.new_empty((size, *rows.shape[1:]))
        with names.under(self._name.reversed() if reverse else self._name):
            work = dist.all_to_all_single(result, rows, receive, send, group=self._group, async_op=True)
        return Pending(result, [work], [rows])


def wait_now(flights: Iterable[InFlight]) -> None:
    """Wait for transfers that have been launched, without a node of the graph."""
    for flight in flights:
        if flight.forward is not None:
            flight.forward.wait()


def start(
    rows: Tensor, output_splits: Splits, input_splits: Splits, group: Any, after: Tensor | None = None
) -> InFlight:
    """Launch an all-to-all. All ranks of the group must start the same transfers in the same order.

    Args:
        rows: rows grouped by destination rank, ``[sum(input_splits), ...]``; must not change until the wait.
        output_splits: number of rows from each rank.
        input_splits: number of rows to each rank.
        group: process group.
        after: mark of an earlier transfer, see :meth:`InFlight.wait_and_mark`. In backward, the reverse of
            the earlier transfer starts only after the reverse of this one is complete, regardless of
            :meth:`InFlight.give_way`.
    """
    flight = InFlight(output_splits, input_splits, group)
    flight.received = _Start.apply(rows, flight, after)
    place = getattr(flight.received.grad_fn, "_sequence_nr", None)
    if place is not None:
        flight.place = place()
    return flight


def depart(rows: Tensor, output_splits: Splits, input_splits: Splits, group: Any) -> tuple[Tensor, InFlight]:
    """Launch an all-to-all whose wait is in another part of a cut graph; see the module's docstring.

    Returns:
        Empty tensor (edge) whose backward waits for the gradient of ``rows``, and the transfer.
    """
    flight = InFlight(output_splits, input_splits, group)
    flight.forward = flight.send(rows)
    return _Depart.apply(rows, flight), flight


class _Depart(torch.autograd.Function):
    """Node before a cut of the graph; its backward waits for the gradient of the sent rows."""

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
    """Wrap Megatron's ``all_to_all`` to run only the start or the wait inside the contexts below."""

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
    """Within the block, Megatron's all-to-alls start without waiting, and return their receive buffers.

    Args:
        flights: list to which the started transfers are appended.
        after: mark of an earlier transfer; see :func:`start`.
    """

    def launch(group: Any, rows: Tensor, output_splits: Splits, input_splits: Splits) -> Tensor:
        flight = start(rows, output_splits, input_splits, group, after)
        flights.append(flight)
        assert flight.received is not None
        return flight.received

    return _inside(launch)


def departing(flights: list[InFlight]) -> AbstractContextManager[None]:
    """Within the block, Megatron's all-to-alls start as in :func:`depart`, and return their edges ``[0]``."""

    def launch(group: Any, rows: Tensor, output_splits: Splits, input_splits: Splits) -> Tensor:
        edge, flight = depart(rows, output_splits, input_splits, group)
        flights.append(flight)
        return edge

    return _inside(launch)


def departed(flights: list[InFlight]) -> AbstractContextManager[None]:
    """Within the block, Megatron's all-to-alls send nothing: the first forward has sent the same rows.

    Args:
        flights: transfers of the first forward in order, through which the gradients return. Each all-to-all
            removes the first one.
    """

    def rejoin(group: Any, rows: Tensor, output_splits: Splits, input_splits: Splits) -> Tensor:
        edge: Tensor = _Depart.apply(rows, flights.pop(0))
        return edge

    return _inside(rejoin)


def arriving(flights: list[InFlight]) -> AbstractContextManager[None]:
    """Within the block, Megatron's all-to-alls wait for the first of ``flights``; their input is its edge."""

    def arrive(group: Any, edge: Tensor, output_splits: Splits, input_splits: Splits) -> Tensor:
        return flights.pop(0).arrive(edge)

    return _inside(arrive)


def returning(rows: Tensor) -> AbstractContextManager[None]:
    """Within the block, Megatron's all-to-all returns ``rows``, which have already arrived."""
    return _inside(lambda *_: rows)
