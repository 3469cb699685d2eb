"""Scores and the selection from them: slabs of many rows and of few, bf16 and FP8."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.dsa import cuda
from benchmarks.parts import Tell, rows_of, table
from benchmarks.registry import Metrics
from benchmarks.released import INDEX_DIM, MODELS
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.quantised_indexer import quantised_indexer

LENGTHS = (8192, 32768, 4096, 131072)
"""Numbers of rows and keys, the most important first."""
HEADS = tuple(sorted({model.index_heads for model in MODELS.values()}, reverse=True))
_TOPK = MODELS["deepseek-v3.2"].topk
_ROUNDS, _FEW, _LONG = 7, 3, 30_000
"""Timed calls: 7, or 3 for more than 30,000 rows."""
SLABS, SHORT_SLABS = "slabs", "slabs of 1024 rows"
BF16, FP8 = "bf16", "fp8"


@dataclass(frozen=True)
class Sizes:
    """One problem: number of rows and keys, index heads and their width, entries per row."""

    length: int
    heads: int
    dim: int = INDEX_DIM
    topk: int = _TOPK

    @property
    def flops(self) -> float:
        """Operations of all scores of causal rows."""
        # length (length + 1) / 2 causal pairs, with two operations for each number of a head.
        return float(self.length * (self.length + 1) * self.heads * self.dim)


def problems(quick: bool = False) -> list[Sizes]:
    """Return all problems, the most important first; with ``quick`` a small one."""
    if quick:
        return [Sizes(256, 8, 32, 64)]
    return [Sizes(length, heads) for length in LENGTHS for heads in HEADS]


def run(quick: bool, tell: Tell, device: str = "cuda") -> Metrics:
    """Return ``ms`` and the fraction of a matmul's rate by problem, dtype and variant, or ``refused``.

    ``ms`` is measured on an idle device, which waits for the host to launch; ``ms_behind`` on a device that
    is still busy with another call. Variants whose results differ in one bit are refused.

    Args:
        quick: a small problem.
        tell: callback that gets all figures so far, after each problem.
        device: device to run on.
    """
    peak = cuda.matmul_rate(_ROUNDS)
    figures: dict[str, Any] = {"matmul_tflops": peak / 1e12}
    for sizes in problems(quick):
        for dtype, operator in ((BF16, lightning_indexer), (FP8, quantised_indexer)):
            name = f"S{sizes.length}, {sizes.heads} heads, {dtype}"
            try:
                figures[name] = _compared(sizes, operator, peak, device)
            except torch.cuda.OutOfMemoryError:
                figures[name] = "does not fit into the memory of the device"
        tell(figures)
    return figures


def _compared(sizes: Sizes, operator: Callable[..., Any], peak: float, device: str) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(1, sizes.length, *shape, generator=generator, device=device).bfloat16()

    operands = drawn(sizes.heads, sizes.dim), drawn(sizes.dim), drawn(sizes.heads) / sizes.heads

    def select() -> tuple[Tensor, ...]:
        figures = operator(*operands, sizes.topk, backend="triton")
        return figures if isinstance(figures, tuple) else (figures,)

    expected: tuple[Tensor, ...] | None = None
    figures: dict[str, Any] = {}
    rounds = _FEW if sizes.length > _LONG else _ROUNDS
    for way in (SLABS, SHORT_SLABS):
        with _in_way(way):
            results = select()
            expected = results if expected is None else expected
            if not all(map(torch.equal, expected, results)):
                return {**figures, "refused": f"{way} selects otherwise than {SLABS}"}
            del results
            seconds = {"ms": cuda.seconds(select, rounds), "ms_behind": cuda.seconds(select, rounds, select)}
        figures[way] = {name: each * 1e3 for name, each in seconds.items()}
        # Behind another call the launch is hidden, so that only the device's work counts.
        figures[way]["fraction_of_matmul"] = sizes.flops / seconds["ms_behind"] / peak
    return figures


@contextlib.contextmanager
def _in_way(way: str) -> Iterator[None]:
    # Import here: the report may be written on a machine without Triton.
    from mindspeed_dsa.ops.lightning_indexer import triton as indexer

    rows = indexer.SLAB_ROWS if way == SHORT_SLABS else indexer.SELECTED_ROWS
    with mock.patch.object(indexer, "SELECTED_ROWS", rows):
        yield


def words(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report's section; nothing if the part did not run.

    Args:
        found: metrics of the case ``gpu``.
    """
    part = found.get("selection", {})
    rows = {name: row for name, row in rows_of(found, "selection").items() if SLABS in row}
    if not rows:
        return
    yield "## Scores and selection"
    yield ""
    yield (
        f"A bf16 matmul of 8192 in the same process reaches {part['matmul_tflops']:.0f} TFLOP/s. Time with "
        "an idle device, and behind another call; of the latter the part of the matmul's rate."
    )
    yield ""

    def cells(problem: str, way: str, row: Mapping[str, float]) -> tuple[Any, ...]:
        rate = f"{row['fraction_of_matmul']:.0%}"
        over = row["ms_behind"] / rows[problem][SLABS]["ms_behind"]
        return f"{problem}: {way}", row["ms"], row["ms_behind"], rate, f"{over:.2f}"

    yield from table(
        ("", "ms", "ms behind", "of the matmul", "over slabs"),
        (
            cells(name, way, row)
            for name, ways in rows.items()
            for way, row in ways.items()
            if isinstance(row, dict)
        ),
    )
