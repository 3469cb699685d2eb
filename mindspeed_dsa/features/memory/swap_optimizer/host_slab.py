"""Where optimizer state lies on the host, and how it is cut for the way to the device.

A *slab* is one buffer of float32, ``[rows, numel]``: the parameters of an optimizer one after the other,
in every row the same columns. Three rows are master weight, ``exp_avg`` and ``exp_avg_sq``; two are the
moments alone, where the model's own weight is float32. A *chunk* is a range of columns. Adam works element
by element, so a chunk may begin and end inside a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.platforms import host_pool


@dataclass(frozen=True, eq=False)
class Parameter:
    """What an optimizer updates.

    Attributes:
        main: the optimizer's own tensor, a key of its state. Its numbers are on the host, unless it is the
            model's float32 weight itself.
        group: number of its parameter group.
        weights: gives the model's weights that are made from it, ``[piece.numel()]``; ``None`` if ``main``
            is the model's weight.
        position: parameters are updated in this order; with sharding, that of the buckets they lie in.
    """

    main: Tensor
    group: int
    weights: Callable[[], Tensor] | None
    position: int = 0

    @property
    def piece(self) -> Tensor:
        """What this rank has of ``main``: all of it, unless it is sharded."""
        return local_of(self.main)

    @property
    def rows(self) -> int:
        """Numbers on the host for each of the parameter's."""
        return 2 if self.weights is None else 3


class Slab:
    """Float32 numbers of parameters that have equally many rows.

    Attributes:
        rows: ``[rows, numel]``, on the host; the moments are zero at first.
        starts: first column of each parameter.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = sorted(parameters, key=lambda each: each.position)
        count = self.parameters[0].rows
        self.starts: dict[Tensor, int] = {}
        numel = 0
        for each in self.parameters:
            self.starts[each.main] = numel
            numel += each.piece.numel()
        # A padding number: Megatron's writer assumes that a tensor which fills its storage is never changed.
        memory = host_pool.shared.keep(4 * (count * numel + 1), owner=self).view(torch.float32)
        self.rows = memory[:-1].view(count, numel)
        self.rows[-2:].zero_()

    def of(self, parameter: Parameter) -> tuple[Tensor, ...]:
        """The parameter's numbers on this rank, one tensor per row, shaped as they are there."""
        start, piece = self.starts[parameter.main], parameter.piece
        return tuple(row[start : start + piece.numel()].view(piece.shape) for row in self.rows)


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that lies in a chunk: ``parameter[start:end]``, from ``column`` on."""

    parameter: Parameter
    start: int
    end: int
    column: int


@dataclass(frozen=True)
class Chunk:
    """Some columns of a slab.

    Attributes:
        host: ``[rows, columns]``, a view of the slab.
        pieces: the parts of parameters inside, in order, without gaps.
    """

    host: Tensor
    pieces: tuple[Piece, ...]


def cut(slab: Slab, columns: int) -> list[Chunk]:
    """Chunks of ``columns`` columns; the last one takes what is left, and there is one at least."""
    numel = slab.rows.size(1)
    return [
        Chunk(slab.rows[:, first:last], tuple(_pieces(slab, first, last)))
        for first, last in ((at, min(at + columns, numel)) for at in range(0, max(numel, 1), columns))
    ]


def _pieces(slab: Slab, first: int, last: int) -> Iterator[Piece]:
    for parameter in slab.parameters:
        begin, numel = slab.starts[parameter.main], parameter.piece.numel()
        start, end = max(first - begin, 0), min(last - begin, numel)
        # One without elements has no moments, but steps to count: it goes with the column before it.
        if start < end or (numel == 0 and max(begin - 1, 0) in range(first, max(last, 1))):
            yield Piece(parameter, start, end, begin + start - first)
