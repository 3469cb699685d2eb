"""Steps with full recomputation, EP2 without a pipeline: Megatron's, and in pairs that recompute inside."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.linkbed import LinkBed
from benchmarks.moe.problem import deviation, minima, start
from benchmarks.pipeline.pairs import QUICK, SWITCH, Sizes, hidden, step_of
from benchmarks.registry import Metrics

AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
VARIANTS = ("stock", "pairs", "no transfers")


def run(link: str, quick: bool) -> Metrics:
    """The cell's entries."""
    with LinkBed(2, link) as bed:
        found = bed.run("benchmarks.pipeline.recomputed_pairs:measure", sizes=QUICK if quick else Sizes())[0]
    print(f"recomputed pairs: {found}", file=sys.stderr, flush=True)
    return metrics(found)


def metrics(found: Mapping[str, Any]) -> Metrics:
    """Convert least times of steps to ratios.

    Args:
        found: of :func:`measure`.
    """
    wall = {name: timing.wall for name, timing in found["times"].items()}
    return {
        "recomputed_fb_overlap_speedup": wall["stock"] / wall["pairs"],
        "recomputed_pairs": hidden(found),
    }


def measure(sizes: Sizes) -> dict[str, Any]:
    """Times of a step's variants, each of which recomputes all layers; the same on all ranks."""
    start(**SWITCH)
    step = step_of(sizes, **AGAIN)

    def variant(name: str) -> Callable[[], object]:
        return lambda: step(name)

    worst = deviation(step("pairs", 2), step("stock", 2))
    works = {name: variant(name) for name in VARIANTS}
    return {"deviation": worst, "times": minima(works, sizes.rounds)}
