"""Tuning of the number of chunks: once per kind of call, sizes and group."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from mindspeed_dsa.log import Log
from mindspeed_dsa.megatron.measured import slowest, timed

Kind = Literal["column forward", "column backward", "row forward", "row backward"]
CANDIDATES = (1, 2, 4, 8)
_GAIN = 0.97
"""More than one chunk is chosen only if it takes less than this fraction of the time of one."""
_MOST_ROW_COUNTS = 16
"""Number of lengths that are tuned; further ones use the choice of the nearest tuned length."""
_ROUNDS = 9
_BUDGET_S = 4.0
"""Rounds stop early when a candidate takes long."""


@dataclass(frozen=True)
class Problem:
    """Key of a choice: ``[m, k] @ [k, n]`` is the matmul of one rank.

    Attributes:
        kind: layer and direction.
        sequence_parallel: gather and reduce-scatter, or all-reduce.
        m, k, n: sizes; for backward those of the input gradient.
        learns: whether the weight is trainable.
        dtype: of the input.
        device: its type.
        ranks: of the tensor parallel group, by their global numbers.
        variant: anything else that changes the computation, such as the backend.
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


_measured: dict[Problem, dict[int, int]] = {}
"""Chunks by number of rows, for problems with the number of rows set to 0."""


def forget() -> None:
    """Reset all choices, for example after the machine or the link changed."""
    _measured.clear()


def chosen() -> Mapping[Problem, int]:
    """Return all tuned choices."""
    return {
        replace(problem, m=m): chunks for problem, by_m in _measured.items() for m, chunks in by_m.items()
    }


Run = Callable[[int], object]


def chunks_for(problem: Problem, group: Any, prepare: Callable[[], Run], log: Log) -> int:
    """Return the fastest number of chunks; a collective call of all ranks of the group.

    Random states do not change, and the ranks agree: they compare the slowest rank's times.

    Args:
        problem: key of the choice.
        group: tensor parallel group.
        prepare: creates a function that runs the call once with a number of chunks, without side effects;
        called only for tuning.
        log: gets one line per tuned choice and pipeline stage.
    """
    by_m = _measured.setdefault(replace(problem, m=0), {})
    if problem.m in by_m:
        return by_m[problem.m]
    if len(by_m) >= _MOST_ROW_COUNTS:
        return by_m[min(by_m, key=lambda m: (abs(m - problem.m), m))]
    times = _measure(group, prepare())
    best = min(times, key=lambda chunks: times[chunks])
    by_m[problem.m] = best if times[best] < _GAIN * times[1] else 1
    _report(problem, by_m[problem.m], times, log)
    return by_m[problem.m]


def _measure(group: Any, run: Run) -> dict[int, float]:
    """Return seconds by number of chunks: medians over rounds in which the candidates alternate."""
    first = slowest({chunks: timed(partial(run, chunks), group) for chunks in CANDIDATES}, group)
    rounds = max(1, min(_ROUNDS, int(_BUDGET_S / max(sum(first.values()), 1e-9))))
    found: dict[int, list[float]] = {chunks: [] for chunks in CANDIDATES}
    for _ in range(rounds):
        for chunks in CANDIDATES:
            found[chunks].append(timed(partial(run, chunks), group))
    return slowest({chunks: statistics.median(seconds) for chunks, seconds in found.items()}, group)


def _report(problem: Problem, choice: int, times: Mapping[int, float], log: Log) -> None:
    measured = ", ".join(f"{chunks}: {1e3 * seconds:.2f} ms" for chunks, seconds in times.items())
    word = "1 chunk, as stock" if choice == 1 else f"{choice} chunks"
    log.info("%s: %s (%s)", problem, word, measured, ranks="stage")
