"""Time bounds of scores and their selection for causal rows; the two do not overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.kernels import cases, model
from benchmarks.kernels.compiled import Kernel
from benchmarks.kernels.model import Gpu, Work

LENGTHS = (8192, 32768, 131072)
SCORES = "score_slab_kernel"
# Instructions per score of the pass that lists a row's scores; counted in the compiled code.
_LISTED = 29
# Steps of both bisections, in the sample (10) and in the list (14), for normally distributed scores. A step
# compares and counts every entry.
_STEPS, _ENTRIES, _PER_ENTRY = 24, 4096, 2


def in_fp8(words: str) -> str:
    """Return the words of a call whose products are of e4m3 numbers."""
    return f"{words}, fp8"


def bounds(kernels: Mapping[str, Kernel], sizes: Mapping[str, tuple[int, int]], gpu: Gpu) -> dict[str, Any]:
    """Return milliseconds by problem: ``scores``, ``selection`` and their sum ``both``.

    Args:
        kernels: score kernels by the words of their call.
        sizes: index heads and their width, by the words of the call in bf16.
        gpu: GPU with the rates; FP8 doubles the rate of products.
    """
    milliseconds: dict[str, Any] = {}
    for words, (heads, dim) in sizes.items():
        for kind, called, bytes_of_one in (("bf16", words, 2), ("fp8", in_fp8(words), 1)):
            rates = replace(gpu, flops=gpu.flops * 2) if kind == "fp8" else gpu
            kernel = kernels[called]
            for length in LENGTHS:
                ms = {
                    "scores": model.seconds(kernel, scores(kernel, length, bytes_of_one), rates) * 1e3,
                    "selection": _selecting(selection(length), rates) * 1e3,
                }
                ms["both"] = ms["scores"] + ms["selection"]
                milliseconds[f"S{length}, {heads} x {dim}, {kind}"] = {
                    name: round(each, 3) for name, each in ms.items()
                }
    return milliseconds


def scores(kernel: Kernel, length: int, size: int) -> Work:
    """Return the work of all scores of ``length`` causal rows, in ``size`` bytes per number."""
    constants = kernel.constants
    heads, dim, keys, rows = (constants[name] for name in ("HEADS", "DIM", "BLOCK_N", "BLOCK_Q"))
    pairs = length * (length + 1) // 2
    # Bytes per pair: a block reads its keys and queries, and writes an fp32 score for each pair.
    moved = ((keys + rows * heads) * dim * size + rows * keys * 4) / (rows * keys)
    flops = 2 * pairs * heads * dim
    return Work(1, flops, flops, pairs * moved, pairs * 4, operations=3 * pairs * heads)


def selection(length: int) -> Work:
    """Return the work of the selection from stored scores of ``length`` causal rows."""
    # Rows with up to topk keys need no selection.
    pairs, rows = length * (length + 1) // 2, max(0, length - cases.TOPK)
    operations = pairs * _LISTED + rows * _STEPS * _ENTRIES * _PER_ENTRY
    return Work(1, 0, 0, pairs * 4, pairs * 4, operations=operations)


def _selecting(work: Work, gpu: Gpu) -> float:
    return max(
        work.operations / model.OPERATIONS / gpu.multiprocessors / gpu.clock,
        work.l2 / gpu.l2,
        work.memory / gpu.memory,
    )
