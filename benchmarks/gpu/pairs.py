"""The attention's backward with the queries' gradient of two rows at a time, beside one row at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from benchmarks.dsa import cuda
from benchmarks.dsa.problem import Sizes
from benchmarks.gpu.projects import Problem
from benchmarks.parts import Tell, rows_of, table
from benchmarks.registry import Metrics
from benchmarks.released import MODELS

DEVIATION = 1e-3
"""Distance of gradients by norm above which nothing is timed: both sum the same products in the same order,
but keys' gradients are added in none."""
HEADS = 64
LENGTHS, SHARED = (8192, 32768), (0.8, None)
"""Rows, and which part of a row's keys the next one has, too; None for what chance gives."""
_ROUNDS = 7
PAIRS, SINGLE = "two rows", "one row"


def problems(quick: bool = False) -> list[tuple[Sizes, float | None]]:
    """Return sizes and shared parts, what matters first; with ``quick`` a small one."""
    if quick:
        return [(Sizes(length=24, heads=2, topk=8), 0.8)]
    model = MODELS["deepseek-v3.2"]
    return [(Sizes.of(model, length=length, heads=HEADS), shared) for length in LENGTHS for shared in SHARED]


def run(quick: bool, tell: Tell, device: str = "cuda") -> Metrics:
    """By problem and way the milliseconds of a backward, or ``refused``.

    Args:
        quick: a small problem.
        tell: called with all figures so far after each problem.
        device: where.
    """
    from mindspeed_dsa.ops.sparse_flash_attention import triton as attention

    found: dict[str, Any] = {}
    for sizes, shared in problems(quick):
        name = f"S{sizes.length}, {'independent rows' if shared is None else f'neighbours share {shared}'}"
        problem = Problem(sizes, device, shared)
        backward, row = problem.ours["backward"], {}
        found[name] = row
        for way, paired in ((SINGLE, False), (PAIRS, True)):
            with mock.patch.object(attention, "PAIRS_OF_ROWS", paired):
                row[f"{way}, apart"] = problem.apart("backward", backward())
                if not row[f"{way}, apart"] <= DEVIATION:
                    row["refused"] = f"{way} differs by {row[f'{way}, apart']:.1e} from the operator's own"
                    break
                row[way] = cuda.seconds(backward, _ROUNDS, backward) * 1e3
        tell(found)
        del problem, backward
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def words(found: Mapping[str, Any]) -> Iterator[str]:
    """Section of the report; nothing if the part did not run.

    Args:
        found: metrics of the case ``gpu``.
    """
    rows = {name: row for name, row in rows_of(found, "pairs").items() if PAIRS in row}
    if not rows:
        return
    yield "## Backward by rows and by pairs of rows"
    yield ""
    yield f"Milliseconds of a backward with {HEADS} heads, by rows at a time in the queries' gradient."
    yield "Two at a time are taken where `PAIRS_OF_ROWS` of `ops/sparse_flash_attention/triton.py` is set."
    yield ""
    yield from table(
        ("", PAIRS, SINGLE, f"{PAIRS} / {SINGLE}"),
        ((name, row[PAIRS], row[SINGLE], f"{row[PAIRS] / row[SINGLE]:.2f}") for name, row in rows.items()),
    )
