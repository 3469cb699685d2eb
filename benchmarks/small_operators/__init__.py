"""Small operators and the host's time: all switches for them compared with stock Megatron."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch._inductor import config as inductor

from benchmarks.memory.child import Child
from benchmarks.registry import Metrics
from benchmarks.small_operators.job import EAGER_OPERATORS, SMALL, Sizes

_MODULE = "benchmarks.small_operators.job"
SWITCHES: dict[str, Any] = {"compile_regions": True, "fused_operators": ["all"]}
MODELS = {
    "small": SMALL,
    "large": replace(SMALL, hidden=2048, length=512, sequences=1, layers=1, heads=16, experts=4),
}
QUICK = {"small": replace(SMALL, hidden=64, layers=1, experts=2, heads=2)}
_NARROW = 4
"""Hidden size per head of layers bound by the host: their arithmetic is a small share of a dispatch."""
_SETTLED = 2
"""Steps that compile everything: a router's first pass determines the code compiled in its second one."""


def run(device: str, quick: bool = False) -> Metrics:
    """Return all metrics of the case.

    Args:
        device: device to run on.
        quick: a model too small for meaningful figures.
    """
    with tempfile.TemporaryDirectory(prefix="small-operators-") as cache:
        figures = {
            name: _measure(sizes, device, f"{cache}/{number}", 2 if quick else 15)
            for number, (name, sizes) in enumerate((QUICK if quick else MODELS).items())
        }
    metrics = {
        metric: {name: row[metric] for name, row in figures.items()}
        for metric in next(iter(figures.values()))
    }
    failed = [text for row in figures.values() for text in row["failed"]]
    return {**metrics, "switches": SWITCHES, "failed": failed}


def _measure(sizes: Sizes, device: str, cache: str, rounds: int) -> dict[str, Any]:
    """Return one model's metrics; compiled code goes to an empty folder, which a second job reuses."""

    def ours(**environment: str) -> Child:
        caching = {"TORCHINDUCTOR_CACHE_DIR": cache, **environment}
        return Child("ours", sizes, SWITCHES, device, _MODULE, caching)

    with ExitStack() as stack:
        stock = stack.enter_context(Child("stock", sizes, {}, device, _MODULE))
        on = stack.enter_context(ours())
        firsts = [[child.ask("step") for _ in range(_SETTLED + 1)] for child in (stock, on)]
        _require_same_losses(*firsts)
        before = on.ask("compiled")
        pairs = []
        for number in range(rounds):
            order = (stock, on) if number % 2 == 0 else (on, stock)
            steps = {child.name: child.ask("step") for child in order}
            pairs.append((steps["stock"]["seconds"], steps["ours"]["seconds"]))
        on.ask("short step")
        after = on.ask("compiled")
        saved = _pair(stock, on, "saved", "bytes")
        off_seconds, on_seconds = (statistics.median(each) for each in zip(*pairs, strict=True))
        gain = off_seconds - on_seconds
        cold = _start_up(firsts[1], on_seconds) - _start_up(firsts[0], off_seconds)
        with ours() as again:
            warm = _start_up([again.ask("step") for _ in range(_SETTLED)], on_seconds)
            warm -= _start_up(firsts[0], off_seconds)
        # Kernels appear in profiles only if they are compiled for that, which takes longer.
        counted = stack.enter_context(ours(TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE="1"))
        for child in (stock, counted):
            for _ in range(_SETTLED + 1):
                child.ask("few")
        dispatches = _pair(stock, counted, "dispatches", "dispatches")
    return {
        "dispatches_per_layer": dispatches,
        "host_us_per_layer": _host(sizes, device, f"{cache}-narrow", rounds),
        "host_us_without_triton": (
            _host(sizes, device, f"{cache}-eager", rounds, {EAGER_OPERATORS: "1"})
            if hasattr(inductor, "fallback_by_default")
            else None
        ),
        "saved_bytes_ratio": saved["ratio"],
        "step_seconds": {"stock": off_seconds, "ours": on_seconds},
        "step_time_ratio": statistics.median(o / s for s, o in pairs),
        "compile_seconds": {"cold": cold, "cached": warm},
        "compile_payback_steps": {
            name: seconds / gain if gain > 0 else "never: a step is not faster"
            for name, seconds in (("cold", cold), ("cached", warm))
        },
        "regions": after["regions"],
        "graph_breaks": after["graph_breaks"],
        "recompilations": sum(after["regions"].values()) - sum(before["regions"].values()),
        "failed": after["failed"],
    }


def _host(
    sizes: Sizes, device: str, cache: str, rounds: int, environment: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Measure the host's work for a layer without the arithmetic, which on a CPU is the host's as well.

    The layers and operators are the same, but so narrow that a product takes less than its dispatch. They run
    on one thread: waking others would count as arithmetic.

    Args:
        sizes: model's sizes; the model is made narrow.
        device: device to run on.
        cache: empty folder for compiled code.
        rounds: number of times that both sides are measured, in alternation.
        environment: environment variables of our side.
    """
    narrow = replace(sizes, hidden=_NARROW * sizes.heads)
    alone = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
    with (
        Child("stock, narrow", narrow, {}, device, _MODULE, alone) as stock,
        Child("ours, narrow", narrow, SWITCHES, device, _MODULE, {**alone, **(environment or {})}) as ours,
    ):
        for child in (stock, ours):
            for _ in range(_SETTLED + 1):
                child.ask("few")
        found = [(stock.ask("host")["microseconds"], ours.ask("host")["microseconds"]) for _ in range(rounds)]
    return _ratio(*(statistics.median(each) for each in zip(*found, strict=True)))


def _require_same_losses(stock: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> None:
    for one, other in zip(stock, ours, strict=True):
        if abs(one["loss"] - other["loss"]) > 1e-5 * abs(one["loss"]):
            raise RuntimeError(f"the losses are not the same: {one['loss']} and {other['loss']}")


def _start_up(steps: Sequence[dict[str, Any]], usual: float) -> float:
    """Return the time that the first steps took longer than later ones."""
    return sum(step["seconds"] - usual for step in steps[:_SETTLED])


def _pair(stock: Child, ours: Child, command: str, metric: str) -> dict[str, float]:
    return _ratio(stock.ask(command)[metric], ours.ask(command)[metric])


def _ratio(stock: float, ours: float) -> dict[str, float]:
    print(f"stock {stock}, ours {ours}", file=sys.stderr, flush=True)
    return {"stock": stock, "ours": ours, "ratio": ours / stock}
