"""What Megatron's ``all_to_all`` does inside of a block: the first half of a transfer, or the second."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from mindspeed_dsa.parallel.all_to_all import InFlight, Splits, depart, start

_Half = Callable[[Any, Tensor, Splits, Splits], Tensor]
_half: ContextVar[_Half | None] = ContextVar("half of an all-to-all", default=None)


def part_all_to_all(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``all_to_all``."""

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


@contextlib.contextmanager
def _inside(half: _Half) -> Iterator[None]:
    token = _half.set(half)
    try:
        yield
    finally:
        _half.reset(token)


def launching(
    flights: list[InFlight], after: Tensor | None = None
) -> contextlib.AbstractContextManager[None]:
    """In the block an all-to-all is started, added to ``flights``, and returns the buffer of its rows.

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


def departing(flights: list[InFlight]) -> contextlib.AbstractContextManager[None]:
    """As :func:`launching`, where a cut of the graph follows: ``[0]`` takes the place of the buffer."""

    def launch(group: Any, rows: Tensor, output_splits: Splits, input_splits: Splits) -> Tensor:
        edge, flight = depart(rows, output_splits, input_splits, group)
        flights.append(flight)
        return edge

    return _inside(launch)


def arriving(flights: list[InFlight]) -> contextlib.AbstractContextManager[None]:
    """In the block an all-to-all waits for the first of ``flights``; it is given the ``[0]`` of its start."""

    def arrive(group: Any, edge: Tensor, output_splits: Splits, input_splits: Splits) -> Tensor:
        return flights.pop(0).arrive(edge)

    return _inside(arrive)
