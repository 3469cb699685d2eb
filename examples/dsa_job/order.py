"""The order of samples: it depends on how many were used before, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator


class MicrobatchOrder:
    """Which samples this rank's next microbatches hold; an endless batch sampler.

    A global batch is the same whatever the layout: microbatch after microbatch, and within each the
    data parallel ranks one after the other.

    Args:
        length: samples in the data set.
        consumed: samples that all ranks together have used before.
        micro_batch_size, rank, ranks: of the data parallel group.
    """

    def __init__(self, length: int, consumed: int, micro_batch_size: int, rank: int, ranks: int) -> None:
        self._length = length
        self._next = consumed + rank * micro_batch_size
        self._size = micro_batch_size
        self._stride = micro_batch_size * ranks

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [index % self._length for index in range(self._next, self._next + self._size)]
            self._next += self._stride
