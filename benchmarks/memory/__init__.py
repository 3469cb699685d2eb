"""Memory features: device bytes per parameter, bytes of activations, and their cost in time."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.memory import copy_engine
from benchmarks.memory.child import Child
from benchmarks.memory.job import FULL, Sizes
from benchmarks.registry import Metrics

FEATURES: dict[str, dict[str, Any]] = {
    "reuse-fp32-param": {},
    "recompute-activation-function": {},
    "recompute-norm": {},
    "swap-attention": {},
    "swap-optimizer": {},
    "virtual-optimizer": {"virtual_optimizer": ["all"]},
}
"""Flags without leading dashes, and their switches if a flag needs more than its name."""

ACTIVATIONS = ("recompute-activation-function", "recompute-norm", "swap-attention")
SAVED = {"reuse-fp32-param": 2, "swap-optimizer": 12, "virtual-optimizer": 8}
"""Formulas' values: bytes saved per parameter at rest, on one rank."""
SWAP_TIMES = 16
"""Default of ``--swap-optimizer-times``: its peak over rest is 3 buffers of 12 / N bytes per parameter."""
# For tests: everything is measured, on a model too small for meaningful figures.
QUICK = Sizes(layers=2, hidden=64, ffn=128, heads=4, vocabulary=128, length=32, sequences=2, long_sequences=4)
STEPS = ("step", "long step")
GATE_STEPS = 2


def run(device: str, quick: bool = False, timed: str | None = None) -> Metrics:
    """Return all metrics of the case.

    Args:
        device: device to run on.
        quick: a model too small for meaningful figures.
        timed: comma-separated names in :data:`FEATURES`: measure only the time of a step with these.
    """
    sizes = QUICK if quick else FULL
    rounds = {"step": 7, "long step": 3} if timed is None else {"step": 2, "long step": 2}
    rounds = dict.fromkeys(STEPS, 2) if quick else rounds
    told = {"tokens": {command: tokens_of(sizes, command) for command in STEPS}, "rounds": rounds}
    if timed is not None:
        names = timed.split(",")
        if unknown := set(names) - set(FEATURES):
            raise SystemExit(
                f"memory: --timed names {', '.join(sorted(unknown))}; use some of {', '.join(FEATURES)}"
            )
        return {**compare(names, sizes, rounds, device, bytes_too=False), **told}
    figures = compare(list(FEATURES), sizes, rounds, device)
    figures.update(swap_auto(sizes, rounds["step"], device))
    rest, peak = figures["device_bytes_per_param"], figures["device_peak_bytes_per_param"]
    return {
        **figures,
        "saved_bytes_per_param": {name: rest["off"] - rest[name] for name in SAVED},
        "formula_bytes_per_param": {name: -saved for name, saved in SAVED.items()},
        "swap_optimizer_staging": {
            "bytes_per_param": peak["swap-optimizer"] - rest["swap-optimizer"],
            "bound": 36 / SWAP_TIMES,
        },
        **told,
    }


def tokens_of(sizes: Sizes, command: str) -> int:
    """Return the tokens of a step."""
    return sizes.length * (sizes.sequences if command == "step" else sizes.long_sequences)


def switches_of(name: str) -> dict[str, Any]:
    """Return the arguments of ``mindspeed_dsa.enable`` for a feature; none for ``off``."""
    return {} if name == "off" else FEATURES[name] or {name.replace("-", "_"): True}


def compare(
    names: Sequence[str], sizes: Sizes, rounds: Mapping[str, int], device: str, bytes_too: bool = True
) -> dict[str, dict[str, float]]:
    """Compare a job without features with one job for each feature, in processes that alternate.

    All jobs make the same steps, so that their weights can be compared at the end.

    Args:
        names: names of features.
        sizes: sizes of model and steps.
        rounds: number of steps that each job makes, by kind of step.
        device: device to run on.
        bytes_too: whether to measure memory in addition to the time of steps.

    Raises:
        RuntimeError: the jobs do not train to the same weights.
    """
    with ExitStack() as stack:
        jobs = {
            name: stack.enter_context(Child(name, sizes, switches_of(name), device))
            for name in ("off", *names)
        }
        require_same_training(list(jobs.values()))
        figures = _bytes(jobs) if bytes_too else {}
        for command, count in rounds.items():
            figures.update(step_ratios(list(jobs.values()), command, count))
        _require_same_weights(list(jobs.values()))
    return figures


AUTO: dict[str, dict[str, Any]] = {
    "off": {},
    "all": {"swap_attention": True},
    "auto": {"swap_attention": "auto"},
}
_UNDECIDED_STEPS = 2
"""Steps before ``--swap-attention auto`` decides."""
_LINK = 0.75
"""Rate of the link: bytes that all swaps of a step move, per duration of a step.

A forward, a third of the step, then moves 0.75 / 3 = 1/4 of these bytes: half of the copies to the host.
"""


def swap_auto(sizes: Sizes, rounds: int, device: str) -> dict[str, dict[str, float]]:
    """Compare swapping everything, and swapping only what is hidden, with a job that swaps nothing.

    On a CPU, copy engines of a chosen rate stand in for a device's.

    Args:
        sizes: sizes of model and steps.
        rounds: steps of each job.
        device: device to run on; only a CPU's link rate is chosen.

    Returns:
        By job, ratios of time, MiB that a step copies, and peak MiB of activations; and the link's rate.

    Raises:
        RuntimeError: the jobs do not train to the same weights.
    """
    environment, rate = {}, 0.0
    if device == "cpu":
        rate = _rate_of_link(sizes)
        environment = {copy_engine.VARIABLE: str(rate)}
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(Child(name, sizes, switches, device, environment=environment))
            for name, switches in AUTO.items()
        ]
        require_same_training(jobs)
        for job in jobs:
            job.ask("step")
        before = {job.name: job.ask("copied")["bytes"] for job in jobs}
        for job in jobs:
            job.ask("step")
        copied = {job.name: job.ask("copied")["bytes"] - before[job.name] for job in jobs}
        times = step_ratios(jobs, "step", rounds)
        peaks = {job.name: job.ask("activation peak")["bytes"] / 2**20 for job in jobs}
        _require_same_weights(jobs)
    return {
        "swap_auto_step_ratio": times["step_time_ratio"],
        "swap_auto_step_cpu_ratio": times["step_cpu_time_ratio"],
        "swap_auto_copied_mib": {name: value / 2**20 for name, value in copied.items()},
        "swap_auto_peak_mib": peaks,
        "swap_auto_link": {"bytes_per_second": rate},
    }


def _rate_of_link(sizes: Sizes) -> float:
    # At this rate copies take no time.
    unhurried = {copy_engine.VARIABLE: "1e15"}
    with Child("all", sizes, AUTO["all"], "cpu", environment=unhurried) as job:
        job.ask("step")
        before = job.ask("copied")["bytes"]
        seconds = min(job.ask("step")["seconds"] for _ in range(_UNDECIDED_STEPS))
        moved = (job.ask("copied")["bytes"] - before) / _UNDECIDED_STEPS
    return float(_LINK * moved / seconds)


def _bytes(jobs: Mapping[str, Child]) -> dict[str, dict[str, float]]:
    parameters = jobs["off"].ask("parameters")["parameters"]
    figures = {
        metric: {name: job.ask(command)["bytes"] / parameters for name, job in jobs.items()}
        for metric, command in (
            ("device_bytes_per_param", "rest"),
            ("device_peak_bytes_per_param", "update peak"),
        )
    }
    peaks = {name: job.ask("activation peak")["bytes"] for name, job in jobs.items()}
    shown = [name for name in jobs if name == "off" or name in ACTIVATIONS]
    figures["activation_peak_ratio"] = {name: peaks[name] / peaks["off"] for name in shown}
    figures["activation_peak_mib"] = {name: peaks[name] / 2**20 for name in shown}
    return figures


def require_same_training(jobs: Sequence[Child]) -> None:
    """Raise unless the first steps, which are also the warmup, agree in every bit: all features are exact."""
    off, *others = jobs
    for number in range(GATE_STEPS):
        steps = {child.name: child.ask("step") for child in jobs}
        for what in ("loss", "norm"):
            for on in others:
                if steps[off.name][what] != steps[on.name][what]:
                    raise RuntimeError(f"{on.name}: {what} of step {number} is not the same: {steps}")
    _require_same_weights(jobs)


def _require_same_weights(jobs: Sequence[Child]) -> None:
    expected, *found = [child.ask("digest") for child in jobs]
    for on, digest in zip(jobs[1:], found, strict=True):
        if digest != expected:
            raise RuntimeError(f"{on.name}: the weights are not the same as without")


def step_ratios(jobs: Sequence[Child], command: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return medians over rounds of the ratio on / off; each job makes one step per round.

    Args:
        jobs: jobs, the first one without features.
        command: kind of step.
        rounds: number of rounds; each begins with another job.

    Returns:
        The ratios by clock, and the seconds of the job without features, by metric.
    """
    off, *others = jobs
    figures: dict[str, list[dict[str, float]]] = {"seconds": [], "cpu_seconds": []}
    for number in range(rounds):
        start = number % len(jobs)
        steps = {child.name: child.ask(command) for child in [*jobs[start:], *jobs[:start]]}
        for clock, values in figures.items():
            values.append({name: step[clock] for name, step in steps.items()})
        _say(f"{command}, round {number + 1} of {rounds}: {steps}")
    middle: Callable[[list[float]], float] = statistics.median
    metric = command.replace(" ", "_")
    result = {f"{metric}_seconds_off": {c: middle([v[off.name] for v in figures[c]]) for c in figures}}
    for clock, name in (("seconds", "time"), ("cpu_seconds", "cpu_time")):
        result[f"{metric}_{name}_ratio"] = {
            off.name: 1.0,
            **{on.name: middle([v[on.name] / v[off.name] for v in figures[clock]]) for on in others},
        }
    return result


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
