"""Steps with full recomputation, EP2 without a pipeline: Megatron's, and pairs that recompute inside.

Measured with evenly spread tokens, and with popular experts whose weights move in pairs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

from benchmarks.linkbed import LinkBed
from benchmarks.moe.balanced import SKEWED, skew
from benchmarks.moe.problem import deviation, minima, start
from benchmarks.pipeline.pairs import QUICK, SWITCH, Sizes, hidden, step_of
from benchmarks.registry import Metrics

AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EVEN_WAYS = ("stock", "pairs", "no transfers")
SKEWED_WAYS = ("stock", "pairs", "pairs, balanced")


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries."""
    sizes = QUICK if quick else Sizes()
    with LinkBed(2, link) as bed:
        even = bed.run("benchmarks.pipeline.recomputed_pairs:measure", sizes=sizes)[0]
        skewed = bed.run("benchmarks.pipeline.recomputed_pairs:measure", sizes=sizes, zipf=SKEWED)[0]
    print(f"recomputed pairs: {even} {skewed}", file=sys.stderr, flush=True)
    return metrics(even, skewed)


def metrics(even: Mapping[str, Any], skewed: Mapping[str, Any]) -> Metrics:
    """Convert least times of steps to ratios.

    Args:
        even: result of :func:`measure` with tokens spread evenly.
        skewed: result of :func:`measure` with popular experts.
    """
    wall = {name: timing.wall for name, timing in even["times"].items()}
    popular = {name: 1e3 * timing.wall for name, timing in skewed["times"].items()}
    return {
        "recomputed_fb_overlap_speedup": wall["stock"] / wall["pairs"],
        "recomputed_pairs": hidden(even),
        "stack_speedup": popular["stock"] / popular["pairs, balanced"],
        "stack": {
            "speedup_without_balance": popular["stock"] / popular["pairs"],
            "milliseconds": popular,
            "processor_milliseconds": {name: 1e3 * each.processor for name, each in skewed["times"].items()},
            "experts_moved": skewed["experts_moved"],
            "deviation": skewed["deviation"],
        },
    }


def measure(sizes: Sizes, zipf: float | None = None) -> dict[str, Any]:
    """Return times of a step's variants, which all recompute all layers; the same on all ranks.

    Args:
        sizes: sizes of the model and the step.
        zipf: exponent of the experts' popularity; ``None`` for routers as initialized.
    """
    from mindspeed_dsa.features.moe.balanced_experts import layer as balanced

    start(balanced_moe_experts=True, **SWITCH)
    step = step_of(sizes, None if zipf is None else partial(_skew, sizes, zipf), **AGAIN)

    def variant(name: str, microbatches: int = sizes.microbatches) -> Callable[[], Any]:
        def work() -> Any:
            stays = mock.patch.object(balanced, "layer_of", return_value=None)
            with contextlib.nullcontext() if "balanced" in name else stays:
                return step(name, microbatches)

        return work

    ways = EVEN_WAYS if zipf is None else SKEWED_WAYS
    moved: list[int] = []
    choose = balanced.choose

    def chosen(*arguments: Any) -> Any:
        plan = choose(*arguments)
        moved.append(len(plan.experts))
        return plan

    expected = variant("stock", 2)()
    with mock.patch.object(balanced, "choose", chosen):
        worst = max(deviation(variant(name, 2)(), expected) for name in ways if name.startswith("pairs"))
    times = minima({name: variant(name) for name in ways}, sizes.rounds)
    return {"deviation": worst, "times": times, "experts_moved": moved}


def _skew(sizes: Sizes, zipf: float, model: Any) -> None:
    for layer in model.decoder.layers:
        skew(layer.mlp.router, sizes, zipf)
