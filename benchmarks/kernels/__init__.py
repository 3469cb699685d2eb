"""Triton kernels compiled ahead of time: registers, spills, traffic, and the rate that a model allows.

Nothing runs on a GPU, and none is needed. ``model_fraction_of_peak`` is a bound computed from the counts, see
:mod:`benchmarks.kernels.model`; it is no measurement.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.registry import Metrics

HEADS = (128, 64, 32, 16)
TARGETS = (90, 80, 100, 120)
# Index heads and their width by the words of the case; the last entry is GLM-5's.
INDEXERS = {"indexer": (64, 128), "indexer 32 x 128": (32, 128)}
# Heads, their width, whether they share a key, and index heads.
DENSE = ((128, 576, True, 64), (16, 192, False, 64), (64, 256, False, 32))
# Suffix of figures for rows that share tiles.
SHARED = ", tiles shared"
# Constants that tell apart kernels of one call, and counts of each kernel.
_FLAGS = ("WITH_OUT", "WITH_SUM", "GATHERED", "RANGES")
_COUNTED = (
    *("registers", "spilled", "shared", "warps", "wgmma", "tcgen05", "mma", "waits"),
    *("async_copies", "vector_atomics"),
)


def run(device: str, quick: bool = False) -> Metrics:
    """Return counts of every kernel in bf16 for the sizes of DeepSeek-V3.2 and GLM-5, and the model's bounds.

    Args:
        device: not used: compilation needs none.
        quick: the attention's kernels with 16 heads for one target only.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("kernels-static compiles the kernels: unset TRITON_INTERPRET")
    targets, heads = (TARGETS[:1], HEADS[-1:]) if quick else (TARGETS, HEADS)
    selecting: dict[str, Any] = {}
    going_back: dict[str, list[Any]] = {}
    tables = {f"sm_{target}": _counts(target, heads, quick, selecting, going_back) for target in targets}
    kernels = [kernel for table in tables.values() for kernel in table.values()]
    spilled: dict[str, int] = {}
    for kernel in kernels:
        spilled[kernel["kernel"]] = max(spilled.get(kernel["kernel"], 0), kernel["spilled"])
    return {
        "serialised": sum(kernel["serialised"] for kernel in kernels),
        "over_limit": sum(kernel["over_limit"] for kernel in kernels),
        "spill_bytes": spilled,
        "model_fraction_of_peak": _model(tables),
        "selection_ms": _selection(selecting),
        "backward_ms": _backward(going_back),
        "kernels": tables,
    }


def _counts(
    target: int,
    heads: tuple[int, ...],
    quick: bool,
    selecting: dict[str, Any],
    going_back: dict[str, list[Any]],
) -> dict[str, dict[str, Any]]:
    """Return the figures of each kernel, by its name, the words of the call and the flags of its source.

    Args:
        target: ten times the compute capability.
        heads: numbers of heads of the attention.
        quick: the attention's kernels only.
        selecting: dict that gets Hopper's score kernels for the selection, by the words of their call.
        going_back: dict that gets the kernels of both ways of Hopper's backward, by the words of their call.
    """
    from benchmarks.kernels import model
    from benchmarks.kernels.cases import WAYS
    from benchmarks.kernels.compiled import SHARED_MEMORY, compiled
    from benchmarks.kernels.selection import SCORES

    figures: dict[str, dict[str, Any]] = {}
    for words, kernel in compiled(target, _calls(target, heads, quick), each=True):
        flags = [f"{name}={kernel.constants[name]}" for name in _FLAGS if name in kernel.constants]
        name = ", ".join([kernel.name, words, *flags])
        print(f"sm_{target}: {name}", file=sys.stderr, flush=True)
        if words.endswith(WAYS):
            going_back.setdefault(words, []).append(kernel)
            # The table has the kernels of the way that is taken already.
            taken = name.replace(f", {words.rpartition(', ')[2]}", "") in figures
            if taken or kernel.name not in model.ATTENTION:
                continue
        if target == TARGETS[0] and kernel.name == SCORES:
            selecting[words] = kernel
        figures[name] = {
            "kernel": kernel.name,
            **{name: getattr(kernel, name) for name in _COUNTED},
            "serialised": int(any(number.startswith("C75") for number in kernel.advisories)),
            "over_limit": int(kernel.shared > SHARED_MEMORY[target]),
            **_rates(target, words, kernel),
        }
    return figures


def _calls(target: int, heads: tuple[int, ...], quick: bool) -> Iterator[tuple[str, Any]]:
    from benchmarks.kernels import cases, selection

    for count in heads:
        yield f"{count} heads", partial(cases.run_attention, torch.bfloat16, count)
        for way in cases.WAYS if target == TARGETS[0] else ():
            call = partial(cases.run_backward, torch.bfloat16, count, way, sums=(False,))
            yield f"{count} heads, {way}", call
    if quick:
        return
    for words, sizes in INDEXERS.items():
        yield words, partial(cases.run_indexer, torch.bfloat16, *sizes)
        yield selection.in_fp8(words), partial(cases.run_quantised_indexer, torch.bfloat16, *sizes)
    for count, dim, shared, index_heads in DENSE:
        words = f"dense, {count} heads of {dim}"
        yield words, partial(cases.run_loss, torch.bfloat16, count, dim, shared, index_heads=index_heads)
    yield "one head of 256 + 256", partial(cases.run_head, torch.bfloat16, cases.GLM)


def _selection(kernels: dict[str, Any]) -> dict[str, Any]:
    """Return time bounds of scores and of their selection, by Hopper GPU and problem."""
    from benchmarks.kernels import model, selection

    hopper = {name: gpu for name, gpu in model.GPUS.items() if gpu.target == TARGETS[0]}
    return {name: selection.bounds(kernels, INDEXERS, gpu) for name, gpu in hopper.items()} if kernels else {}


def _backward(kernels: dict[str, list[Any]]) -> dict[str, Any]:
    """Return time bounds of both ways of the attention's backward, by Hopper GPU and number of heads."""
    from benchmarks.kernels import backward, model

    hopper = {name: gpu for name, gpu in model.GPUS.items() if gpu.target == TARGETS[0]}
    return {name: backward.bounds(kernels, gpu) for name, gpu in hopper.items()}


def _rates(target: int, words: str, kernel: Any) -> dict[str, Any]:
    """Return FLOP per byte, and for each GPU of the target the fraction of its peak that the model allows."""
    from benchmarks.kernels import cases, model

    work = _work(words, kernel)
    if work is None:
        return {}
    rates: dict[str, Any] = {
        "flop_per_l2_byte": round(work.useful / work.l2, 1),
        "flop_per_memory_byte": round(work.useful / work.memory, 1)
        if work.memory
        else "reads the cache only",
        "programs_of_a_row": work.programs,
        "useful_flop": work.useful,
    }
    for name, gpu in model.GPUS.items():
        if gpu.target == target:
            rates[name] = round(work.useful / model.seconds(kernel, work, gpu) / gpu.flops, 3)
            if kernel.name == model.SHARING:
                shared = model.attention(kernel, int(words.split()[0]), cases.TOPK, sharers=model.SHARERS)
                share = shared.useful / model.seconds(kernel, shared, gpu) / gpu.flops
                rates[f"{name}{SHARED}"] = round(share, 3)
    return rates


def _work(words: str, kernel: Any) -> Any:
    """Return the work of one row, or None for kernels that multiply nothing."""
    from benchmarks.kernels import cases, model

    if kernel.name in model.ATTENTION:
        heads = words.split()[0]
        return model.attention(kernel, int(heads), cases.TOPK) if heads.isdecimal() else None
    if kernel.name in model.INDEXER and words in INDEXERS:
        return model.indexer(kernel, cases.TOPK)
    if kernel.name in model.DENSE:
        return model.dense(kernel, int(words.split()[1]))
    return None


def _model(tables: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return fractions of peak by GPU: each kernel in each call, and the attention's backward as a whole."""
    from benchmarks.kernels import cases, model

    ways = ("", *(f", {way}" for way in cases.WAYS))
    by_gpu: dict[str, dict[str, float]] = {}
    for name, gpu in model.GPUS.items():
        table = tables.get(f"sm_{gpu.target}", {})
        fractions = {words: row[name] for words, row in table.items() if name in row}
        for call in (f"{heads} heads{way}" for heads in HEADS for way in ways):
            kernels = (
                rf"(\w+_keys_kernel|{'|'.join(model.ROWS)}), {call}, WITH_SUM=False",
                rf"backward_query_kernel, {call}",
            )
            both = [row for words, row in table.items() if re.fullmatch("|".join(kernels), words)]
            flops = sum(row["useful_flop"] for row in both)
            for kind in ("", SHARED) if any(f"{name}{SHARED}" in row for row in both) else ("",):
                taken = sum(row["useful_flop"] / row.get(f"{name}{kind}", row[name]) for row in both)
                if flops:
                    fractions[f"backward, {call}{kind}"] = round(flops / taken, 3)
        if fractions:
            by_gpu[name] = fractions
    return by_gpu
