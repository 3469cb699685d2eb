"""Memory features: device bytes per parameter, bytes of activations, and their cost in time."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.memory.child import Child
from benchmarks.memory.job import Sizes
from benchmarks.registry import Metrics

FEATURES: dict[str, dict[str, Any]] = {
    "reuse-fp32-param": {},
    "recompute-activation-function": {},
    "recompute-norm": {},
    "swap-attention": {},
    "swap-optimizer": {},
    "virtual-optimizer": {"virtual_optimizer": ["all"]},
}
"""Flags without leading dashes, and their switches where they need more than the name."""

ACTIVATIONS = ("recompute-activation-function", "recompute-norm", "swap-attention")
SAVED = {"reuse-fp32-param": 2, "swap-optimizer": 12, "virtual-optimizer": 8}
"""Values of the formulas: bytes per parameter at rest, on one rank."""
SWAP_TIMES = 16
"""Default of ``--swap-optimizer-times``: its peak over rest is 3 buffers of 12 / N bytes per parameter."""
# For tests: everything is measured, on a model too small to be meaningful.
QUICK = Sizes(layers=2, hidden=64, ffn=128, heads=4, vocabulary=128, length=32, sequences=2)
GATE_STEPS = 3


def run(device: str, quick: bool = False) -> Metrics:
    """All metrics of the case."""
    sizes, pairs = (QUICK, 2) if quick else (Sizes(), 11)
    found: dict[str, dict[str, float]] = {}
    for name in FEATURES:
        for metric, values in compare(name, sizes, pairs, device).items():
            found.setdefault(metric, {}).update(values)
    rest, peak = found["device_bytes_per_param"], found["device_peak_bytes_per_param"]
    return {
        **found,
        "saved_bytes_per_param": {name: rest["off"] - rest[name] for name in SAVED},
        "formula_bytes_per_param": {name: -saved for name, saved in SAVED.items()},
        "swap_optimizer_staging": {
            "bytes_per_param": peak["swap-optimizer"] - rest["swap-optimizer"],
            "bound": 36 / SWAP_TIMES,
        },
        "pairs": pairs,
    }


def switches_of(name: str) -> dict[str, Any]:
    """Arguments of ``mindspeed_dsa.enable`` for a feature of the list."""
    return FEATURES[name] or {name.replace("-", "_"): True}


def compare(name: str, sizes: Sizes, pairs: int, device: str) -> dict[str, dict[str, float]]:
    """One feature and a job without it, in two alternating processes.

    Raises:
        RuntimeError: they do not train to the same weights.
    """
    with (
        Child("off", sizes, {}, device) as off,
        Child(name, sizes, switches_of(name), device) as on,
    ):
        require_same_training(off, on)
        parameters = off.ask("parameters")["parameters"]
        found = {
            metric: {child.name: child.ask(command)["bytes"] / parameters for child in (off, on)}
            for metric, command in (
                ("device_bytes_per_param", "rest"),
                ("device_peak_bytes_per_param", "update peak"),
            )
        }
        peaks = [child.ask("activation peak")["bytes"] for child in (on, off)]
        if name in ACTIVATIONS:
            found["activation_peak_ratio"] = {"off": 1.0, name: peaks[0] / peaks[1]}
            found["activation_peak_mib"] = {"off": peaks[1] / 2**20, name: peaks[0] / 2**20}
        for metric, ratio in step_ratios(off, on, pairs).items():
            found[metric] = {"off": 1.0, name: ratio}
        _require_same_weights(off, on)
    return found


def require_same_training(off: Child, on: Child) -> None:
    """The first steps, which also serve as warm-up; every feature is exact, so bits are compared."""
    for number in range(GATE_STEPS):
        steps = {child.name: child.ask("step") for child in (off, on)}
        for what in ("loss", "norm"):
            if steps[off.name][what] != steps[on.name][what]:
                raise RuntimeError(f"{on.name}: {what} of step {number} is not the same: {steps}")
    _require_same_weights(off, on)


def _require_same_weights(off: Child, on: Child) -> None:
    if off.ask("digest") != on.ask("digest"):
        raise RuntimeError(f"{on.name}: the weights are not the same as without")


def step_ratios(off: Child, on: Child, pairs: int) -> Mapping[str, float]:
    """Medians over pairs of steps, each of two consecutive steps, one per job, of the ratio on / off."""
    found: dict[str, list[float]] = {"seconds": [], "cpu_seconds": []}
    for number in range(pairs):
        order = (off, on) if number % 2 else (on, off)
        steps = {child.name: child.ask("step") for child in order}
        for clock, ratios in found.items():
            ratios.append(steps[on.name][clock] / steps[off.name][clock])
        _say(f"{on.name}: pair {number + 1} of {pairs}, {steps}")
    middle: Callable[[list[float]], float] = statistics.median
    return {
        "step_time_ratio": middle(found["seconds"]),
        "step_cpu_time_ratio": middle(found["cpu_seconds"]),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
