"""Steps with full recompute, in place and in bubbles, on real pipeline ranks that talk over loopback.

In theory a step gets shorter by ``(PP - 1) R``, where ``R`` is the time to recompute a chunk's forward; the
figures are relative to that. Only a rank with its own core is idle in a bubble: if ranks share cores, others
compute meanwhile, and there is little to gain.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist

from benchmarks.moe.problem import deviation, minima
from benchmarks.pipeline.dense_steps import LAYOUTS, QUICK, Sizes, dense_step, on_ranks
from benchmarks.registry import Metrics

SWITCH = {"recompute_in_bubble": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries, with a caution where ranks share cores."""
    found = {name: _layout(*layout, QUICK if quick else Sizes()) for name, layout in LAYOUTS.items()}
    print(f"recompute: {found}", file=sys.stderr, flush=True)
    return {"recompute": found}


def _layout(ranks: int, chunks: int, sizes: Sizes) -> Metrics:
    of_ranks, cores = on_ranks("benchmarks.pipeline.recompute:measure", ranks, chunks, sizes)
    return metrics(of_ranks, _caution(ranks, cores) if cores < ranks else None)


def metrics(of_ranks: Sequence[Mapping[str, Any]], caution: str | None = None) -> Metrics:
    """Convert times of steps to ratios.

    Args:
        of_ranks: results of :func:`measure` by rank.
        caution: reservation about these figures.
    """
    again = 1e3 * statistics.mean(result["again"] for result in of_ranks if result["again"] is not None)
    # Prefer medians: a difference of two least times is chance twice.
    median = {name: 1e3 * timing.median for name, timing in of_ranks[0]["times"].items()}
    least = {name: 1e3 * timing.wall for name, timing in of_ranks[0]["times"].items()}

    def removed(wall: Mapping[str, float]) -> float:
        return (wall["plain"] - wall["bubble"]) / ((len(of_ranks) - 1) * again)

    return {
        "recompute_in_bubble_removed": removed(median),
        "recompute_in_bubble_removed_least": removed(least),
        "step_ratio": median["bubble"] / median["plain"],
        "step_ratio_least": least["bubble"] / least["plain"],
        "milliseconds_median": median,
        "milliseconds": least,
        "chunk_recompute_milliseconds": again,
        "deviation": max(result["deviation"] for result in of_ranks),
        **({"caution": caution} if caution else {}),
    }


def _caution(ranks: int, cores: int) -> str:
    return (
        f"{ranks} ranks share {cores} cores: while one waits for its gradient another computes on its core, "
        "so little time is idle that recomputation could fill; this is not the gain of ranks with cores of "
        "their own"
    )


def measure(chunks: int, sizes: Sizes) -> dict[str, Any]:
    """Return times of both variants, the same on all ranks, and of a chunk's recomputation."""
    step = dense_step(chunks, sizes, SWITCH, FULL)
    seconds: list[float] = []
    variants = {"plain": lambda: step(_plain()), "bubble": lambda: step(_timed(seconds))}
    deviates = deviation(variants["bubble"](), variants["plain"]())
    seconds.clear()
    figures = {"deviation": deviates, "times": minima(variants, sizes.rounds)}
    # A segment is a layer. The last rank of a pipeline without virtual stages waits for no gradient.
    layers = sizes.layers // (dist.get_world_size() * chunks)
    return {**figures, "again": layers * statistics.median(seconds) if seconds else None}


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    from mindspeed_dsa.features.pipeline.recompute_ahead.ahead import Ahead

    with mock.patch.object(Ahead, "begins", return_value=False):
        yield


@contextlib.contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    from mindspeed_dsa.features.pipeline.recompute_ahead import ahead

    original = ahead.recompute_segment

    def recompute(*args: Any) -> None:
        begin = time.perf_counter()
        original(*args)
        seconds.append(time.perf_counter() - begin)

    with mock.patch.object(ahead, "recompute_segment", recompute):
        yield
