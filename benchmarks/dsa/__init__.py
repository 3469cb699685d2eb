"""DSA operators: comparison with Megatron's functions, memory by length, and time over the matmul floor."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from benchmarks.dsa import cuda, forms, sharing
from benchmarks.dsa.child import Child, measure
from benchmarks.dsa.floor import floor_multiples
from benchmarks.dsa.problem import Sizes, require_same_results
from benchmarks.registry import Metrics
from benchmarks.released import MODELS, Released

# A CPU-sized part of a released model; widths of heads, latents and hidden states are kept.
SCALED = {"length": 4096, "heads": 16, "index_heads": 16, "topk": 512}
# Four layers with all index heads of the model: with few heads, many scores tie.
SHARING = {"length": 2048, "heads": 4, "topk": 512}
LENGTHS = (2048, 4096, 8192, 16384)
# One problem for each form of the attention.
GATES = ({"length": 192, "topk": 48}, {"length": 1024, "heads": 4, "index_heads": 4, "topk": 160})
# For tests: all parts run, on problems too small to be meaningful.
QUICK = {"length": 256, "heads": 4, "index_heads": 4, "topk": 64, "hidden_dim": 256, "query_rank": 128}
_DTYPES = {"": torch.float32, "_bf16": torch.bfloat16}


def run(device: str, quick: bool = False, model: str = "deepseek-v3.2", only: str | None = None) -> Metrics:
    """Return the metrics of the case; CPU figures are measured on any device.

    Args:
        device: device to measure on.
        quick: tiny problems.
        model: key of :data:`benchmarks.released.MODELS`.
        only: comma-separated names of parts; default: all.
    """
    if model not in MODELS:
        raise SystemExit(f"dsa: --model {model} is none of {', '.join(MODELS)}")
    parts = list(PARTS) if only is None else only.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"dsa: --only {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    released = MODELS[model]
    metrics: dict[str, Any] = {"model": model, **_of_machine()}
    for part in parts:
        metrics.update(PARTS[part](released, device, quick))
    return metrics


def _sizes(model: Released, quick: bool) -> Sizes:
    return Sizes.of(model, **(QUICK if quick else SCALED))


def _compared(model: Released, device: str, quick: bool) -> Metrics:
    sizes, metrics = _sizes(model, quick), dict[str, Any]()
    gates = [Sizes.of(model, **{**SCALED, **gate}) for gate in GATES]
    for suffix, dtype in _DTYPES.items():
        deviation = max(require_same_results(gate, dtype) for gate in gates)
        _say(f"{dtype}: both sides agree to {deviation:.1e}")
        compared = compare(sizes, rounds=1 if quick else 3, runs=1 if quick else 2, dtype=dtype)
        metrics.update({f"{name}{suffix}": value for name, value in compared.items()})
        metrics[f"correctness_deviation{suffix}"] = deviation
    whole = {name: getattr(Sizes.of(model), name) for name in SCALED if name != "length"}
    return {**metrics, "scaled": {name: f"{getattr(sizes, name)} of {size}" for name, size in whole.items()}}


def _memory(model: Released, device: str, quick: bool) -> Metrics:
    sizes = _sizes(model, quick)
    return memory_growth(sizes, _doubled(sizes) if quick else LENGTHS)


def _forms(model: Released, device: str, quick: bool) -> Metrics:
    sizes = _sizes(model, quick)
    return forms.choice(sizes, _doubled(sizes) if quick else forms.LENGTHS, 1 if quick else 5)


def _doubled(sizes: Sizes) -> tuple[int, int]:
    return sizes.length, 2 * sizes.length


def _floor(model: Released, device: str, quick: bool) -> Metrics:
    sizes = _sizes(model, quick)
    # 2048^3 products in bf16 take minutes on processors without them.
    matmul_size = 256 if quick else 2048
    fp32 = floor_multiples(sizes, torch.float32, 1 if quick else 7, matmul_size)
    bf16 = floor_multiples(sizes, torch.bfloat16, 1 if quick else 3, matmul_size)
    metrics = {
        "floor_multiple": fp32["multiple"],
        "floor_multiple_bf16": bf16["multiple"],
        "matmul_gflops": {"fp32": fp32["matmul_gflops"], "bf16": bf16["matmul_gflops"]},
    }
    if "multiple_onednn" in fp32:
        metrics["floor_multiple_onednn"] = fp32["multiple_onednn"]
    return metrics


def _sharing(model: Released, device: str, quick: bool) -> Metrics:
    if not model.sharing.is_on:
        return {"indexer_time_ratio": "every layer of this model selects"}
    sizes = Sizes.of(model, **(QUICK if quick else SHARING))
    return sharing.measure(sizes, model.sharing, 1 if quick else 3)


def _cuda(model: Released, device: str, quick: bool) -> Metrics:
    return {"cuda": cuda.run(model=model) if device == "cuda" else "not run on a GPU"}


def _of_machine() -> Metrics:
    return {"threads": torch.get_num_threads()}


PARTS: dict[str, Callable[[Released, str, bool], Metrics]] = {
    "compared": _compared,
    "memory": _memory,
    "forms": _forms,
    "floor": _floor,
    "sharing": _sharing,
    "cuda": _cuda,
}


def compare(sizes: Sizes, rounds: int, runs: int, dtype: torch.dtype = torch.float32) -> Metrics:
    """Run both sides in fresh processes whose steps alternate; return medians.

    Args:
        sizes: problem sizes.
        rounds: number of processes per side.
        runs: forward-backward steps per process; memory is measured in the first one.
        dtype: inputs' dtype on both sides.
    """
    by_side: dict[str, list[dict[str, Any]]] = {"fused": [], "megatron": []}
    extra: dict[str, list[float]] = {side: [] for side in by_side}
    for _ in range(rounds):
        with ExitStack() as stack:
            name = str(dtype).removeprefix("torch.")
            children = {side: stack.enter_context(Child(side, sizes, name)) for side in by_side}
            for number in range(runs):
                for side, child in children.items():
                    by_side[side].append(child.run())
                    _say(f"{side}: {by_side[side][-1]}")
                    if number == 0:
                        extra[side].append(by_side[side][-1]["extra_bytes"])
    seconds, cpu_seconds = (
        {side: statistics.median(result[kind] for result in results) for side, results in by_side.items()}
        for kind in ("seconds", "cpu_seconds")
    )
    peaks = {side: statistics.median(values) for side, values in extra.items()}
    return {
        "speedup_vs_megatron": seconds["megatron"] / seconds["fused"],
        "cpu_time_ratio_vs_megatron": cpu_seconds["megatron"] / cpu_seconds["fused"],
        "memory_ratio_vs_megatron": peaks["megatron"] / peaks["fused"],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "extra_peak_mib": {side: value / 2**20 for side, value in peaks.items()},
    }


def memory_growth(sizes: Sizes, lengths: Sequence[int]) -> Metrics:
    """Return this library's extra peak memory at each length, and the largest ratio between neighbours.

    Args:
        sizes: problem sizes; the length is replaced.
        lengths: ascending lengths, each twice the previous one.
    """
    extra = [measure("fused", replace(sizes, length=length))["extra_bytes"] for length in lengths]
    _say(f"extra bytes at {lengths}: {extra}")
    return {
        "memory_growth_per_doubling": max(b / a for a, b in pairwise(extra)),
        "extra_peak_mib_by_length": {str(n): value / 2**20 for n, value in zip(lengths, extra, strict=True)},
    }


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
