"""Hot experts' weights that move to the tokens: effect on a skewed layer, and on an even one."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.linkbed import LinkBed
from benchmarks.moe import overlap
from benchmarks.moe.problem import QUICK, Sizes, deviation, layer, minima, start, step_of, timed
from benchmarks.registry import Metrics

SKEWED, EVEN, FOUR = 1.2, 0.0, 0.8
"""Zipf exponents of the experts' popularity on two ranks, and on four; popular experts are neighbours."""
WAYS = ("stock", "balanced", "overlapped", "both")
_ROUNDS = 5


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries."""
    sizes = QUICK if quick else replace(Sizes(), rounds=_ROUNDS)
    with LinkBed(2, link) as bed:
        skewed = bed.run("benchmarks.moe.balanced:measure", sizes=sizes, zipf=SKEWED)
        even = bed.run("benchmarks.moe.balanced:measure", sizes=sizes, zipf=EVEN)
    cores = sorted(os.sched_getaffinity(0))
    # With fewer than four cores neighbours share one, so the busiest two ranks have the same core.
    shared = [cores[rank * min(len(cores), 4) // 4] for rank in range(4)]
    with LinkBed(4, link, shared) as bed:
        four = bed.run("benchmarks.moe.balanced:take_turns", sizes=sizes, zipf=FOUR)
    for name, found in (("skewed", skewed), ("even", even), ("EP4", four)):
        print(f"{name}: {found[0]}", file=sys.stderr, flush=True)
    return metrics(skewed[0], even[0], four[0])


def metrics(skewed: Mapping[str, Any], even: Mapping[str, Any], four: Mapping[str, Any]) -> Metrics:
    """Convert measured times to ratios.

    Args:
        skewed: result of :func:`measure` with popular experts.
        even: result of :func:`measure` without.
        four: result of :func:`take_turns` with four ranks.
    """

    def wall(found: Mapping[str, Any]) -> dict[str, float]:
        return {name: 1e3 * timing.wall for name, timing in found["times"].items()}

    slow, flat = wall(skewed), wall(even)
    turns = four["turns"]
    ratios = [stock / balanced for stock, balanced in zip(turns["stock"], turns["balanced"], strict=True)]
    return {
        "imbalance_before": skewed["imbalance"]["stock"],
        "imbalance_after": skewed["imbalance"]["balanced"],
        "imbalance_before_ep4": four["imbalance"]["stock"],
        "imbalance_after_ep4": four["imbalance"]["balanced"],
        "balanced_speedup_skewed": slow["stock"] / slow["balanced"],
        "balanced_speedup_skewed_with_overlap": slow["stock"] / slow["both"],
        "balanced_speedup_even": flat["stock"] / flat["balanced"],
        "balanced_speedup_ep4": statistics.median(ratios),
        "balanced_speedup_ep4_range": {"least": min(ratios), "most": max(ratios)},
        "experts_moved": {
            "skewed": skewed["experts_moved"],
            "even": even["experts_moved"],
            "EP4": four["experts_moved"],
        },
        "balanced_rates": skewed["rates"],
        "balanced_milliseconds": {
            "skewed": slow,
            "even": flat,
            "EP4": {name: 1e3 * statistics.median(times) for name, times in turns.items()},
        },
        "balanced_processor_milliseconds": {
            name: 1e3 * timing.processor for name, timing in skewed["times"].items()
        },
        "balanced_deviation": max(found["deviation"] for found in (skewed, even, four)),
    }


def measure(sizes: Sizes, zipf: float) -> dict[str, Any]:
    """Return times of the layer's variants and the balance of rows, the same on all ranks."""
    start(balanced_moe_experts=True, **overlap.SWITCH)
    built, step = _problem(sizes, zipf)

    def variant(name: str) -> Callable[[], object]:
        def work() -> None:
            with way(name):
                step()

        return work

    found = _beside_stock(built, step, WAYS)
    return {**found, "times": minima({name: variant(name) for name in WAYS}, sizes.rounds)}


def take_turns(sizes: Sizes, zipf: float) -> dict[str, Any]:
    """Return the balance of rows, and the wall times in seconds of turns with and without moves."""
    start(balanced_moe_experts=True, **overlap.SWITCH)
    built, step = _problem(sizes, zipf)
    names = ("stock", "balanced")
    found = _beside_stock(built, step, names)
    turns: dict[str, list[float]] = {name: [] for name in names}
    for number in range(sizes.rounds):
        # Each turn begins with the other variant.
        for name in names[:: -1 if number % 2 else 1]:
            with way(name):
                turns[name].append(timed(step).wall)
    return {**found, "turns": turns}


def _problem(sizes: Sizes, zipf: float) -> tuple[Any, Callable[[], dict[str, Tensor]]]:
    """Build a layer with a skewed router, and a step on tokens that differ by rank."""
    built = layer(sizes)
    skew(built.router, sizes, zipf)
    return built, step_of(built, sizes)


def skew(router: Any, sizes: Sizes, zipf: float) -> None:
    """Make Megatron's router prefer experts by Zipf's law; the router still gets gradients.

    Args:
        router: router that gets ``sizes.tokens`` tokens of its rank at once.
        sizes: layer's sizes.
        zipf: exponent; 0 spreads tokens evenly.
    """
    noise = torch.Generator().manual_seed(100 + dist.get_rank())
    popularity = -zipf * torch.arange(1, sizes.experts + 1).log()
    # The top k of logits with Gumbel noise are k draws without replacement.
    uniform = torch.rand(sizes.tokens, sizes.experts, generator=noise).clamp_min(1e-12)
    logits = (popularity - (-uniform.log()).log()).view(sizes.tokens, 1, -1)
    gating = router.gating
    router.gating = MethodType(lambda self, rows: logits + 1e-3 * gating(rows), router)


def _beside_stock(built: Any, step: Callable[[], dict[str, Tensor]], ways: tuple[str, ...]) -> dict[str, Any]:
    """Return the variants' deviation, the most loaded rank's rows over the mean, and the experts moved."""
    from mindspeed_dsa.features.moe.balanced_experts import layer as feature

    figures: dict[str, Any] = {"imbalance": {}, "deviation": 0.0, "rates": {}, "experts_moved": 0}
    choose, rates_of = feature.choose, feature.rates_of

    def chosen(*arguments: Any) -> Any:
        plan = choose(*arguments)
        figures["experts_moved"] = len(plan.experts)
        return plan

    def rates(*arguments: Any) -> Any:
        known = rates_of(*arguments)
        figures["rates"] = {"TFLOP/s": known.matmul / 1e12, "GB/s": known.link / 1e9}
        return known

    with mock.patch.object(feature, "choose", chosen), mock.patch.object(feature, "rates_of", rates):
        with way("balanced"):
            step()  # measures the rates, with rows that are no tokens'
        expected: dict[str, Tensor] = {}
        for name in ways:
            rows = _rows(built)
            with way(name), rows as computed:
                results = step()
            # The first way is stock, the reference of all others.
            expected = expected or results
            figures["deviation"] = max(figures["deviation"], deviation(results, expected))
            loads = torch.tensor([0.0] * dist.get_world_size())
            loads[dist.get_rank()] = computed[0]
            dist.all_reduce(loads)
            # Loads of 10, 10, 10 and 30 rows have a mean of 15 and an imbalance of 2.
            figures["imbalance"][name] = float(loads.max() / loads.mean())
    return figures


@contextlib.contextmanager
def _rows(built: Any) -> Iterator[list[int]]:
    """Count the rows that experts compute on this rank."""
    computed = [0]

    def count(module: Any, inputs: tuple[Tensor, ...]) -> None:
        computed[0] += inputs[0].size(0)

    hooks = [expert.register_forward_pre_hook(count) for expert in built.experts.local_experts]
    try:
        yield computed
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    """Run the layer in the block as ``stock``, ``balanced``, ``overlapped``, or ``both``."""
    from mindspeed_dsa.features.moe.balanced_experts import layer as feature

    with contextlib.ExitStack() as stack:
        stack.enter_context(overlap.way("overlapped" if name in ("overlapped", "both") else "stock"))
        if name in ("stock", "overlapped"):
            stack.enter_context(mock.patch.object(feature, "layer_of", return_value=None))
        yield
