"""Bounds of the attention's backward on Hopper: by rows, and by tiles of keys that rows share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.kernels import cases, model
from benchmarks.kernels.compiled import Kernel
from mindspeed_dsa.ops.sparse_flash_attention import hopper

LENGTH = 8192
_QUERY = "backward_query_kernel"
_DIM = 576
# Bytes of the gradient of a selected key, in fp32.
_GRADIENT = 4 * _DIM


def bounds(kernels: Mapping[str, list[Kernel]], gpu: model.Gpu) -> dict[str, dict[str, float]]:
    """Return the milliseconds of 8192 causal rows by number of heads, for each way in both modes.

    Args:
        kernels: kernels of a call by its words, "16 heads, by rows".
        gpu: Hopper GPU.
    """
    pairs = LENGTH * cases.TOPK - cases.TOPK * (cases.TOPK - 1) // 2
    found: dict[str, dict[str, float]] = {}
    for words, of_call in kernels.items():
        match = re.fullmatch(rf"(\d+) heads, ({'|'.join(cases.WAYS)})", words)
        if match is not None:
            ms = found.setdefault(f"{match[1]} heads", {})
            for name, seconds in _ways(of_call, int(match[1]), match[2], gpu):
                ms[name] = seconds * pairs / cases.TOPK * 1e3
    return found


def _ways(kernels: list[Kernel], heads: int, way: str, gpu: model.Gpu) -> Iterator[tuple[str, float]]:
    """Yield the seconds of a row, for rows that share no tile, that share tiles, and in a fixed order."""
    by_name = {kernel.name: kernel for kernel in kernels}
    if way == cases.BY_ROWS:
        kernel = next(by_name[name] for name in model.ROWS if name in by_name)
        work = model.attention(kernel, heads, cases.TOPK)
        seconds = model.seconds(kernel, work, gpu)
        yield way, seconds
        passes = 2 if hopper.adds_to_entries(heads) else 1
        yield f"{way}, deterministic", _ordered(seconds, work.memory, passes, gpu)
        return
    query = by_name[_QUERY]
    of_query = model.seconds(query, model.attention(query, heads, cases.TOPK), gpu)
    kernel = by_name[model.SHARING]
    for sharers, words in ((1.0, ", none shared"), (model.SHARERS, "")):
        work = model.attention(kernel, heads, cases.TOPK, sharers=sharers)
        seconds = model.seconds(kernel, work, gpu)
        yield f"{way}{words}", seconds + of_query
        yield (
            f"{way}{words}, deterministic",
            _ordered(seconds, work.memory, 1, gpu, sharers) + of_query,
        )


def _ordered(seconds: float, memory: float, passes: int, gpu: model.Gpu, sharers: float = 1.0) -> float:
    """Return the seconds if gradients are stored by entry, and then added by key.

    Args:
        seconds: time with atomic additions, which also stay in the L2 cache.
        memory: other bytes to memory.
        passes: number of times that gradients are stored: twice if they are added to stored zeros.
        gpu: GPU whose memory the gradients pass through.
        sharers: rows that share a gradient.
    """
    entries = cases.TOPK * _GRADIENT / sharers
    stored = memory + passes * entries
    return max(seconds, stored / gpu.memory) + entries / gpu.memory


def table(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the page's table, on the first of Hopper's GPUs.

    Args:
        metrics: metrics of the case ``kernels-static``.
    """
    gpu, problems = next(iter(metrics["backward_ms"].items()))
    yield "### Attention backward, by rows and by tiles"
    yield ""
    yield (
        f"Bounds in ms, {gpu}, {LENGTH} causal rows, topk {cases.TOPK} "
        f"([measured](gpu.md#attention-backward-on-hopper)). {model.SHARERS} rows share a tile, or none."
    )
    yield ""
    names = list(next(iter(problems.values())))
    yield f"| heads | {' | '.join(names)} |"
    yield f"| {' | '.join(['---'] + ['---:'] * len(names))} |"
    for problem, ms in problems.items():
        yield f"| {problem.split()[0]} | {' | '.join(f'{ms[name]:.3g}' for name in names)} |"
