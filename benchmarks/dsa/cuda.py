"""The operators on a CUDA device: rate, fraction of the measured bf16 matmul rate, and peak memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.dsa.floor import Call, matmul_call, needed_flops, operator_calls
from benchmarks.dsa.problem import Sizes
from benchmarks.registry import Metrics
from benchmarks.released import MODELS, Released

LENGTHS = (4096, 8192, 32768)
HEADS = (128, 64, 16)


def run(
    lengths: tuple[int, ...] = LENGTHS,
    heads: tuple[int, ...] = HEADS,
    rounds: int = 7,
    tell: Callable[[Metrics], None] = lambda found: None,
    model: Released = MODELS["deepseek-v3.2"],
) -> Metrics:
    """Return the operators' figures in bf16, and the matmul rate.

    The figures are nested by ``S<length>_H<heads>``, operator and direction. A problem that exceeds the
    device's memory gets a string instead of figures. Head counts above the model's are left out.

    Args:
        lengths: sequence lengths.
        heads: numbers of heads of the main attention.
        rounds: timed calls per figure.
        tell: callback that gets all figures so far, after each problem.
        model: released model with the other sizes.
    """
    peak = matmul_rate(rounds)
    figures: dict[str, Metrics | float | str] = {"matmul_tflops": peak / 1e12}
    problems = {
        f"S{length}_H{count}": Sizes.of(model, length=length, heads=count)
        for length in lengths
        for count in heads
        if count <= model.heads
    }
    for name, sizes in problems.items():
        try:
            figures[name] = _ours(sizes, peak, rounds)
        except torch.cuda.OutOfMemoryError:
            figures[name] = "does not fit into the memory of the device"
        torch.cuda.empty_cache()
        tell(figures)
    return figures


def matmul_rate(rounds: int) -> float:
    """Return the operations per second of a bf16 matmul of 8192 x 8192 x 8192."""
    matmul, work = matmul_call(8192, torch.bfloat16, "cuda")
    return work / seconds(matmul, rounds)


def _ours(sizes: Sizes, peak: float, rounds: int) -> Metrics:
    flops = needed_flops(sizes)
    return {
        operator: {
            direction: _figures(call, flops[operator][direction], peak, rounds)
            for direction, call in directions.items()
        }
        for operator, directions in operator_calls(sizes, torch.bfloat16, "cuda").items()
    }


def _figures(call: Call, needed: float, peak: float, rounds: int) -> Metrics:
    took = seconds(call, rounds)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return {
        "ms": took * 1e3,
        "tflops": needed / took / 1e12,
        "fraction_of_matmul": needed / took / peak,
        "extra_peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20,
    }


def seconds(call: Call, rounds: int, before: Call = lambda: None) -> float:
    """Return the median seconds of single calls, timed by events on the device.

    Args:
        call: function to time.
        rounds: number of timed calls; two warmup calls precede them.
        before: function called before each timed call, outside the events. Work that it leaves on the device
            hides the host's launch time of the call.
    """
    for _ in range(2):
        call()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
