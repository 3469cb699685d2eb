"""Splits of layers into consecutive pipeline stages whose slowest stage is least.

A stage is a chunk of a rank: in interleaved pipelines and in a V each rank has several. Its time is the sum
of its layers' times. The embedding's time adds to the model's first stage, the time of output layer, loss and
multi-token prediction to the last. Each stage has a layer at least, unless the last one may
have only the end of the model.
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
        lone_end: whether the last stage may have no layer.
    """

    layers: Sequence[float]
    first: float
    last: float
    ranks: int
    chunks: int = 1
    v_shaped: bool = False
    begins: Sequence[bool] = ()
    lone_end: bool = False

    @cached_property
    def _sums(self) -> list[float]:
        """Time before each layer, before the model's end, and after it; the first layer has the embedding."""
        times = [*self.layers, self.last]
        times[0] += self.first
        return [0.0, *accumulate(times)]

    @cached_property
    def _places(self) -> list[int]:
        """Indices of :attr:`_sums` that a stage may begin with, and the last index."""
        count = len(self.layers)
        places = [layer for layer in range(count) if not self.begins or self.begins[layer]]
        return [*places, *[count] * self.lone_end, count + 1]

    def stages(self, sizes: Sequence[int]) -> list[float]:
        """Return the time of each stage.

        Args:
            sizes: number of layers of each stage, in the model's order.
        """
        *ends, _ = accumulate(sizes)
        return self._times([0, *ends, len(self.layers) + 1])

    def ranks_of(self, sizes: Sequence[int]) -> list[float]:
        """Return the time of each rank: the sum of its stages."""
        ranks = [0.0] * self.ranks
        for stage, time in enumerate(self.stages(sizes)):
            ranks[self.rank_of(stage)] += time
        return ranks

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage."""
        turn, rank = divmod(stage, self.ranks)
        return self.ranks - 1 - rank if self.v_shaped and turn % 2 else rank

    def _times(self, ends: Sequence[int]) -> list[float]:
        return [self._sums[end] - self._sums[begin] for begin, end in pairwise(ends)]

    def _sizes(self, ends: Sequence[int]) -> tuple[int, ...]:
        return tuple(min(end, len(self.layers)) - begin for begin, end in pairwise(ends))

    def best(self, most: Sequence[int] = ()) -> tuple[int, ...] | None:
        """Return the number of layers of each stage, in the model's order, with the least slowest stage.

        Among equal splits, it prefers nearly equal ranks, then nearly equal stages.
        ``None`` if no split is possible.

        Args:
            most: largest number of layers of each stage; empty for all.
        """
        count, whole = self.ranks * self.chunks, len(self.layers) + 1
        most = most or [whole] * count
        # Time of the slowest stage by the end of the stages so far, and the beginning of the last of them.
        least = {0: 0.0}
        beginnings: list[dict[int, int]] = []
        for stage in range(count):
            reached: dict[int, tuple[float, int]] = {}
            for end in self._places:
                splits = [
                    (max(slowest, self._sums[end] - self._sums[begin]), begin)
                    for begin, slowest in least.items()
                    if begin < end and min(end, whole - 1) - begin <= most[stage]
                ]
                if splits:
                    reached[end] = min(splits)
            least = {end: slowest for end, (slowest, _) in reached.items()}
            beginnings.append({end: begin for end, (_, begin) in reached.items()})
        if whole not in least:
            return None
        ends = [whole]
        for found_beginnings in reversed(beginnings):
            ends.append(found_beginnings[ends[-1]])
        return self._evened(ends[::-1], least[whole], most)

    def _evened(self, ends: list[int], slowest: float, most: Sequence[int]) -> tuple[int, ...]:
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
                    if any(size > limit for size, limit in zip(self._sizes(other), most, strict=True)):
                        continue
                    now = self._unevenness(other)
                    better = any(a < b * (1 - _PRECISION) for a, b in zip(now, best, strict=True))
                    if now < best and better and max(self._times(other)) <= slowest * (1 + _PRECISION):
                        ends, best, moved = other, now, True
                        break
        return self._sizes(ends)

    def _unevenness(self, ends: Sequence[int]) -> tuple[float, float]:
        """Return the time of the slowest rank, and the sum of the squares of the stages' times."""
        return max(self.ranks_of(self._sizes(ends))), sum(time**2 for time in self._times(ends))
