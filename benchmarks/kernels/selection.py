"""Bounds of scores and the selection from them, causal rows: two launches for each slab, and one for all.

In two launches nothing is multiplied while rows select, and whole slabs pass through memory. In one, rows
select beside products, and the ring of scores stays in the second-level cache: what is short bounds both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.kernels import cases, model
from benchmarks.kernels.compiled import Kernel
from benchmarks.kernels.model import Gpu, Work

LENGTHS = (8192, 32768, 131072)
SLABS, AT_ONCE = "score_slab_kernel", "score_and_select_kernel"
# Instructions of the pass that lists a row's scores, for each; counted in what was compiled.
_LISTED = 29
# Steps of both bisections, in the sample and in the list, for normally distributed scores: 10 and 14; in each
# an entry is compared and counted.
_STEPS, _ENTRIES, _PER_ENTRY = 24, 4096, 2


def words(heads: int, dim: int, fp8: bool, once: bool) -> str:
    """Return the words of a call that selects."""
    kinds = [f"selection by {heads} x {dim}", *(["fp8"] if fp8 else []), *(["one launch"] if once else [])]
    return ", ".join(kinds)


def calls(sizes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, tuple[int, int, bool, bool]]]:
    """Yield words, and heads, their width, whether in FP8 and whether in one launch."""
    for heads, dim in sizes.values():
        for fp8 in (False, True):
            for once in (False, True):
                yield words(heads, dim, fp8, once), (heads, dim, fp8, once)


def bounds(kernels: Mapping[str, Kernel], sizes: Mapping[str, tuple[int, int]], gpu: Gpu) -> dict[str, Any]:
    """Return milliseconds by problem: ``scores``, ``selection``, their sum ``two launches``, ``one launch``.

    Args:
        kernels: by the words of their call, those that form scores.
        sizes: heads and their width.
        gpu: whose rates count; of numbers in FP8 twice the products.
    """
    found: dict[str, Any] = {}
    for heads, dim in sizes.values():
        for fp8 in (False, True):
            apart, together = (kernels[words(heads, dim, fp8, once)] for once in (False, True))
            rates = replace(gpu, flops=gpu.flops * 2) if fp8 else gpu
            for length in LENGTHS:
                kind = "fp8" if fp8 else "bf16"
                of_scores, of_selection = scores(apart, length, 1 if fp8 else 2), selection(length)
                ms = {
                    "scores": model.seconds(apart, of_scores, rates) * 1e3,
                    "selection": _selecting(of_selection, rates) * 1e3,
                }
                both = Work(
                    1,
                    of_scores.flops,
                    of_scores.useful,
                    of_scores.l2 + of_selection.l2,
                    0,
                    operations=of_scores.operations + of_selection.operations,
                )
                ms["two launches"] = ms["scores"] + ms["selection"]
                ms["one launch"] = model.seconds(together, both, rates) * 1e3
                found[f"S{length}, {heads} x {dim}, {kind}"] = {
                    name: round(each, 3) for name, each in ms.items()
                }
    return found


def scores(kernel: Kernel, length: int, size: int) -> Work:
    """Return the work of all scores of ``length`` causal rows, in ``size`` bytes a number."""
    constants = kernel.constants
    heads, dim, keys, rows = (constants[name] for name in ("HEADS", "DIM", "BLOCK_N", "BLOCK_Q"))
    pairs = length * (length + 1) // 2
    moved = ((keys + rows * heads) * dim * size + rows * keys * 4) / (rows * keys)
    flops = 2 * pairs * heads * dim
    return Work(1, flops, flops, pairs * moved, pairs * 4, operations=3 * pairs * heads)


def selection(length: int) -> Work:
    """Return the work of the selection from the scores of ``length`` causal rows, written before."""
    pairs, rows = length * (length + 1) // 2, max(0, length - cases.TOPK)
    operations = pairs * _LISTED + rows * _STEPS * _ENTRIES * _PER_ENTRY
    return Work(1, 0, 0, pairs * 4, pairs * 4, operations=operations)


def _selecting(work: Work, gpu: Gpu) -> float:
    return max(
        work.operations / model.OPERATIONS / gpu.multiprocessors / gpu.clock,
        work.l2 / gpu.l2,
        work.memory / gpu.memory,
    )
