"""DSA operators: comparison with Megatron's own functions, memory by length, and time over the floor."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from benchmarks.dsa import cuda, forms
from benchmarks.dsa.child import Child, measure
from benchmarks.dsa.floor import floor_multiples
from benchmarks.dsa.problem import Sizes, require_same_results
from benchmarks.registry import Metrics
from mindspeed_dsa.ops.cpu.bf16 import operand_dtype

COMPARED = Sizes()
LENGTHS = (2048, 4096, 8192, 16384)
# One for each form of the attention.
GATES = (Sizes(length=192, topk=48), Sizes(length=1024, heads=4, index_heads=4, topk=160))
# For tests: everything is measured, on problems too small to be meaningful.
QUICK = Sizes(length=256, heads=4, index_heads=4, topk=64)
_DTYPES = {"": torch.float32, "_bf16": torch.bfloat16}


def run(device: str, quick: bool = False) -> Metrics:
    """All metrics of the case; the CPU figures are measured on any device."""
    sizes = QUICK if quick else COMPARED
    rounds = 1 if quick else 3
    found: dict[str, Any] = {}
    for suffix, dtype in _DTYPES.items():
        deviation = max(require_same_results(gate, dtype) for gate in GATES)
        _say(f"{dtype}: both sides agree to {deviation:.1e}")
        compared = compare(sizes, rounds, runs=1 if quick else 2, dtype=dtype)
        found.update({f"{name}{suffix}": value for name, value in compared.items()})
        found[f"correctness_deviation{suffix}"] = deviation
    lengths = tuple(sizes.length * 2**n for n in range(2)) if quick else LENGTHS
    found.update(memory_growth(sizes, lengths))
    found.update(forms.choice(sizes, lengths if quick else forms.LENGTHS, 1 if quick else 5))
    fp32 = floor_multiples(sizes, torch.float32, 1 if quick else 7)
    bf16 = floor_multiples(sizes, torch.bfloat16, 1 if quick else 3)
    found.update(
        floor_multiple=fp32["multiple"],
        floor_multiple_bf16=bf16["multiple"],
        matmul_gflops={"fp32": fp32["matmul_gflops"], "bf16": bf16["matmul_gflops"]},
        threads=torch.get_num_threads(),
        bf16_operands={torch.float32: "widened to fp32"}.get(
            operand_dtype(torch.bfloat16), "multiplied as they are"
        ),
    )
    if "multiple_onednn" in fp32:
        found["floor_multiple_onednn"] = fp32["multiple_onednn"]
    found["cuda"] = cuda.run() if device == "cuda" else "not run on a GPU"
    return found


def compare(sizes: Sizes, rounds: int, runs: int, dtype: torch.dtype = torch.float32) -> Metrics:
    """Both sides in fresh processes whose steps alternate; medians.

    Args:
        sizes: of the problem.
        rounds: processes per side.
        runs: forwards and backwards in each; memory is measured in the first one.
        dtype: of the inputs of both sides.
    """
    found: dict[str, list[dict[str, Any]]] = {"fused": [], "megatron": []}
    extra: dict[str, list[float]] = {side: [] for side in found}
    for _ in range(rounds):
        with ExitStack() as stack:
            name = str(dtype).removeprefix("torch.")
            children = {side: stack.enter_context(Child(side, sizes, name)) for side in found}
            for number in range(runs):
                for side, child in children.items():
                    found[side].append(child.run())
                    _say(f"{side}: {found[side][-1]}")
                    if number == 0:
                        extra[side].append(found[side][-1]["extra_bytes"])
    seconds, cpu_seconds = (
        {side: statistics.median(result[kind] for result in results) for side, results in found.items()}
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
    """Extra peak memory of our side at each length, and the largest ratio of consecutive ones.

    Args:
        sizes: of the problem, except its length.
        lengths: each twice the previous one.
    """
    extra = [measure("fused", replace(sizes, length=length))["extra_bytes"] for length in lengths]
    _say(f"extra bytes at {lengths}: {extra}")
    return {
        "memory_growth_per_doubling": max(b / a for a, b in pairwise(extra)),
        "extra_peak_mib_by_length": {str(n): value / 2**20 for n, value in zip(lengths, extra, strict=True)},
    }


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
