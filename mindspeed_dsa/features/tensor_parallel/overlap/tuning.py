"""Measurement of the best number of chunks, once per kind of call, matrix size and process group."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from mindspeed_dsa.feature import Context
from mindspeed_dsa.log import Log
from mindspeed_dsa.megatron.measured import slowest, timed

Kind = Literal["column forward", "column backward", "row forward", "row backward"]
CANDIDATES = (1, 2, 4, 8)
_GAIN = 0.97
"""Maximum time relative to one chunk at which more chunks are chosen."""
_MOST_ROW_COUNTS = 16
"""Maximum number of tuned row counts; further ones use the choice for the nearest tuned count."""
_ROUNDS = 9
_BUDGET_S = 4.0
"""Time budget; slow candidates are measured in fewer rounds."""


@dataclass(frozen=True)
class Problem:
    """Key under which the best number of chunks is cached, for a matmul ``[m, k] @ [k, n]`` on each rank.

    Attributes:
        kind: kind of layer (column or row parallel), and forward or backward.
        sequence_parallel: whether ranks all-gather and reduce-scatter instead of all-reducing.
        m, k, n: matrix sizes; for backward the sizes of the input gradient's matmul.
        learns: whether the weight is trainable.
        dtype: dtype of the input.
        device: device type.
        ranks: global ranks of the tensor parallel group.
        variant: any other property that changes the computation, such as the backend.
    """

    kind: Kind
    sequence_parallel: bool
    m: int
    k: int
    n: int
    learns: bool
    dtype: torch.dtype
    device: str
    ranks: tuple[int, ...]
    variant: str = ""

    def __str__(self) -> str:
        if self.sequence_parallel:
            transfer = "reduce-scatter" if self.kind in ("column backward", "row forward") else "all-gather"
        else:
            transfer = "all-reduce"
        return (
            f"{self.kind}, {transfer}, m {self.m}, k {self.k}, n {self.n}, {str(self.dtype)[6:]}, "
            f"TP {len(self.ranks)}"
        )


Run = Callable[[int], object]


class Tuning:
    """Cache of the fastest number of chunks per :class:`Problem`, for one session."""

    def __init__(self, context: Context[Any]) -> None:
        self._log = context.log
        # From a problem with `m` set to 0, and from `m`, to the number of chunks.
        self._measured: dict[Problem, dict[int, int]] = {}

    def chosen(self) -> Mapping[Problem, int]:
        """Return a dict from tuned problem to its number of chunks."""
        tuned = self._measured.items()
        return {replace(problem, m=m): chunks for problem, by_m in tuned for m, chunks in by_m.items()}

    def chunks_for(self, problem: Problem, group: Any, prepare: Callable[[], Run]) -> int:
        """Return the fastest number of chunks; all ranks of the group must call it.

        Random states do not change. All ranks get the same number, because the slowest rank's times are
        compared.

        Args:
            problem: key of the choice.
            group: tensor parallel group.
            prepare: function that returns the function to time; it is called only if the choice is not
                cached. The function to time takes a number of chunks, runs once, and has no side effects.
        """
        by_m = self._measured.setdefault(replace(problem, m=0), {})
        if problem.m in by_m:
            return by_m[problem.m]
        if len(by_m) >= _MOST_ROW_COUNTS:
            return by_m[min(by_m, key=lambda m: (abs(m - problem.m), m))]
        times = _measure(group, prepare())
        best = min(times, key=lambda chunks: times[chunks])
        # 1 chunk in 1.00 ms and 4 chunks in 0.98 ms: 1 chunk, as the gain is below 3 %.
        by_m[problem.m] = best if times[best] < _GAIN * times[1] else 1
        _report(problem, by_m[problem.m], times, self._log)
        return by_m[problem.m]


def _measure(group: Any, run: Run) -> dict[int, float]:
    """Return a dict from number of chunks to the median time in seconds over several rounds."""
    # Candidates alternate within a round, so that drifts of the clock rate affect all of them.
    first = slowest({chunks: timed(partial(run, chunks), group) for chunks in CANDIDATES}, group)
    # All ranks must make the same number of rounds, so it follows from the slowest rank's times.
    rounds = max(1, min(_ROUNDS, int(_BUDGET_S / max(sum(first.values()), 1e-9))))
    times: dict[int, list[float]] = {chunks: [] for chunks in CANDIDATES}
    for _ in range(rounds):
        for chunks in CANDIDATES:
            times[chunks].append(timed(partial(run, chunks), group))
    return slowest({chunks: statistics.median(seconds) for chunks, seconds in times.items()}, group)


def _report(problem: Problem, choice: int, times: Mapping[int, float], log: Log) -> None:
    measured = ", ".join(f"{chunks}: {1e3 * seconds:.2f} ms" for chunks, seconds in times.items())
    word = "1 chunk, as stock" if choice == 1 else f"{choice} chunks"
    log.info("%s: %s (%s)", problem, word, measured, ranks="stage")
