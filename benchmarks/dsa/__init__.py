"""DSA operators: comparison with Megatron's own functions, memory by length, and time over the floor."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from benchmarks.dsa import cuda
from benchmarks.dsa.child import measure
from benchmarks.dsa.floor import floor_multiples
from benchmarks.dsa.problem import Sizes, require_same_results
from benchmarks.registry import Metrics

COMPARED = Sizes()
LENGTHS = (2048, 4096, 8192, 16384)
GATE = Sizes(length=192, topk=48)
# For tests: everything is measured, on problems too small to be meaningful.
QUICK = Sizes(length=256, heads=4, index_heads=4, topk=64)


def run(device: str, quick: bool = False) -> Metrics:
    """All metrics of the case; the CPU figures are measured on any device."""
    deviation = require_same_results(GATE)
    _say(f"both sides agree to {deviation:.1e}")
    sizes = QUICK if quick else COMPARED
    rounds = 1 if quick else 3
    found: dict[str, Any] = dict(compare(sizes, rounds, runs=1 if quick else 2))
    lengths = tuple(sizes.length * 2**n for n in range(2)) if quick else LENGTHS
    found.update(memory_growth(sizes, lengths))
    fp32 = floor_multiples(sizes, torch.float32, 1 if quick else 7)
    bf16 = floor_multiples(sizes, torch.bfloat16, 1 if quick else 3)
    found.update(
        floor_multiple=fp32["multiple"],
        floor_multiple_bf16=bf16["multiple"],
        matmul_gflops={"fp32": fp32["matmul_gflops"], "bf16": bf16["matmul_gflops"]},
        correctness_deviation=deviation,
    )
    if "multiple_onednn" in fp32:
        found["floor_multiple_onednn"] = fp32["multiple_onednn"]
    found["cuda"] = cuda.run() if device == "cuda" else "not run on a GPU"
    return found


def compare(sizes: Sizes, rounds: int, runs: int) -> Metrics:
    """Both sides in alternating fresh processes; medians.

    Args:
        sizes: of the problem.
        rounds: processes per side.
        runs: forwards and backwards in each; memory is measured in the first one.
    """
    found: dict[str, list[dict[str, Any]]] = {"fused": [], "megatron": []}
    for _ in range(rounds):
        for side, results in found.items():
            results.append(measure(side, runs, sizes))
            _say(f"{side}: {results[-1]}")
    seconds, cpu_seconds = (
        {
            side: statistics.median(s for result in results for s in result[kind])
            for side, results in found.items()
        }
        for kind in ("seconds", "cpu_seconds")
    )
    extra = {
        side: statistics.median(result["extra_bytes"] for result in results)
        for side, results in found.items()
    }
    return {
        "speedup_vs_megatron": seconds["megatron"] / seconds["fused"],
        "memory_ratio_vs_megatron": extra["megatron"] / extra["fused"],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "extra_peak_mib": {side: value / 2**20 for side, value in extra.items()},
        "threads": found["fused"][0]["threads"],
    }


def memory_growth(sizes: Sizes, lengths: Sequence[int]) -> Metrics:
    """Extra peak memory of our side at each length, and the largest ratio of consecutive ones.

    Args:
        sizes: of the problem, except its length.
        lengths: each twice the previous one.
    """
    extra = [measure("fused", 1, replace(sizes, length=length))["extra_bytes"] for length in lengths]
    _say(f"extra bytes at {lengths}: {extra}")
    return {
        "memory_growth_per_doubling": max(b / a for a, b in pairwise(extra)),
        "extra_peak_mib_by_length": {str(n): value / 2**20 for n, value in zip(lengths, extra, strict=True)},
    }


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
