"""Splits of layers into consecutive pipeline stages whose slowest stage is least.

A stage is a chunk of a rank: in interleaved pipelines and in a V each rank has several. Its time is the sum
of its layers' times. The embedding's time adds to the model's first stage, the time of output layer, loss and
multi-token prediction to the last. Each stage has a layer at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

_PRECISION = 1e-9
"""Relative difference of times that counts as none."""


@dataclass(frozen=True)
class Dealing:
    """Layers to deal to the stages of a pipeline.

    Attributes:
        layers: time of each layer, without the embedding and the end of the model.
        first: time of the embedding.
        last: time of output layer, loss and multi-token prediction.
        ranks: number of pipeline ranks.
        chunks: number of stages per rank.
        v_shaped: whether second chunks are on the ranks in reverse order.
        begins: whether a stage may begin with a layer, for each layer; empty for all.
    """

    layers: Sequence[float]
    first: float
    last: float
    ranks: int
    chunks: int = 1
    v_shaped: bool = False
    begins: Sequence[bool] = ()

    @cached_property
    def _sums(self) -> list[float]:
        """Time of all layers below each layer; the ends are part of the first and the last layer."""
        times = list(self.layers)
        times[0] += self.first
        times[-1] += self.last
        return [0.0, *accumulate(times)]

    @cached_property
    def _places(self) -> list[int]:
        """Layers, counted from 0, that a stage may begin with, and the number of layers."""
        count = len(self.layers)
        return [layer for layer in range(count) if not self.begins or self.begins[layer]] + [count]

    def stages(self, sizes: Sequence[int]) -> list[float]:
        """Return the time of each stage.

        Args:
            sizes: number of layers of each stage, in the model's order.
        """
        return self._times([0, *accumulate(sizes)])

    def ranks_of(self, sizes: Sequence[int]) -> list[float]:
        """Return the time of each rank: the sum of its stages."""
        ranks = [0.0] * self.ranks
        for stage, time in enumerate(self.stages(sizes)):
            turn, rank = divmod(stage, self.ranks)
            ranks[self.ranks - 1 - rank if self.v_shaped and turn % 2 else rank] += time
        return ranks

    def _times(self, ends: Sequence[int]) -> list[float]:
        return [self._sums[end] - self._sums[begin] for begin, end in pairwise(ends)]

    def best(self) -> tuple[int, ...] | None:
        """Return the number of layers of each stage, in the model's order, with the least slowest stage.

        Of equal splits, the result is one with nearly equal ranks, and then with nearly equal stages.
        ``None`` if a stage may begin with fewer layers than there are stages.
        """
        count = self.ranks * self.chunks
        # Time of the slowest stage by the end of the stages so far, and the beginning of the last of them.
        least = {0: 0.0}
        beginnings: list[dict[int, int]] = []
        for _ in range(count):
            reached: dict[int, tuple[float, int]] = {}
            for end in self._places:
                splits = [
                    (max(slowest, self._sums[end] - self._sums[begin]), begin)
                    for begin, slowest in least.items()
                    if begin < end
                ]
                if splits:
                    reached[end] = min(splits)
            least = {end: slowest for end, (slowest, _) in reached.items()}
            beginnings.append({end: begin for end, (_, begin) in reached.items()})
        if len(self.layers) not in least:
            return None
        ends = [len(self.layers)]
        for found_beginnings in reversed(beginnings):
            ends.append(found_beginnings[ends[-1]])
        return self._evened(ends[::-1], least[len(self.layers)])

    def _evened(self, ends: list[int], slowest: float) -> tuple[int, ...]:
        """Move ends of stages by one place as long as that evens ranks or stages, within ``slowest``."""
        best = self._unevenness(ends)
        moved = True
        while moved:
            moved = False
            for number in range(1, len(ends) - 1):
                place = self._places.index(ends[number])
                for near in (self._places[place - 1], self._places[place + 1]):
                    if not ends[number - 1] < near < ends[number + 1]:
                        continue
                    other = [*ends[:number], near, *ends[number + 1 :]]
                    now = self._unevenness(other)
                    better = any(a < b * (1 - _PRECISION) for a, b in zip(now, best, strict=True))
                    if now < best and better and max(self._times(other)) <= slowest * (1 + _PRECISION):
                        ends, best, moved = other, now, True
                        break
        return tuple(end - begin for begin, end in pairwise(ends))

    def _unevenness(self, ends: Sequence[int]) -> tuple[float, float]:
        """Return the time of the slowest rank, and the sum of the squares of the stages' times."""
        sizes = [end - begin for begin, end in pairwise(ends)]
        return max(self.ranks_of(sizes)), sum(time**2 for time in self._times(ends))
