"""Attention's backward on Hopper: by rows, and by tiles of keys that rows share."""

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

DEVIATION = 5e-3
"""Relative distance of gradients by norm above which nothing is timed.

Both variants round the same products to bf16, but add them in other orders.
"""
ROWS, TILES = "by rows", "by tiles"
_MODES = (
    *(((8192, 16), False), ((8192, 32), False), ((8192, 64), False), ((8192, 128), False)),
    *(((8192, 16), True), ((8192, 64), True), ((8192, 128), True)),
    *(((32768, 16), False), ((32768, 64), False)),
)
"""Rows and heads, and whether gradients of keys are added in a fixed order; the most important first."""
_SHARED = (None, 0.8)
"""Fraction of a row's keys that the next row also has; None for independent rows."""
_ROUNDS = 7


def problems(quick: bool = False) -> list[tuple[Sizes, bool, float | None]]:
    """Return sizes, determinism and shared fractions, the most important first; with ``quick`` small ones."""
    if quick:
        return [(Sizes(length=24, heads=2, topk=8), deterministic, 0.8) for deterministic in (False, True)]
    model = MODELS["deepseek-v3.2"]
    return [
        (Sizes.of(model, length=length, heads=heads), deterministic, shared)
        for (length, heads), deterministic in _MODES
        for shared in _SHARED
    ]


def run(quick: bool, tell: Tell, device: str = "cuda") -> Metrics:
    """Return the milliseconds of a backward by problem and variant, or ``refused``.

    Args:
        quick: a small problem.
        tell: callback that gets all figures so far, after each problem.
        device: device to run on.
    """
    from mindspeed_dsa.ops.sparse_flash_attention import hopper

    # Memory that nobody has written stays as it is: to fill it would be timed.
    torch.utils.deterministic.fill_uninitialized_memory = False
    figures: dict[str, Any] = {}
    for sizes, deterministic, shared in problems(quick):
        torch.use_deterministic_algorithms(deterministic)
        kind = "independent rows" if shared is None else f"neighbours share {shared}"
        problem = Problem(sizes, device, shared)
        backward, row = problem.ours["backward"], {}
        mode = ", deterministic" if deterministic else ""
        figures[f"S{sizes.length}, {sizes.heads} heads, {kind}{mode}"] = row
        for way in (TILES, ROWS):
            with mock.patch.object(hopper, "prefers_rows", return_value=way == ROWS):
                row[f"{way}, apart"] = problem.apart("backward", backward())
                # This form also refuses NaN.
                if not row[f"{way}, apart"] <= DEVIATION:
                    row["refused"] = f"{way} differs by {row[f'{way}, apart']:.1e} from the operator's own"
                    break
                row[way] = cuda.seconds(backward, _ROUNDS, backward) * 1e3
        tell(figures)
        del problem, backward
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return figures


def words(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report's section; nothing if the part did not run.

    Args:
        found: metrics of the case ``gpu``.
    """
    rows = {name: row for name, row in rows_of(found, "backward").items() if ROWS in row}
    if not rows:
        return
    yield "## Backward by rows and by tiles that rows share"
    yield ""
    yield "Milliseconds of a whole backward on Hopper."
    yield ""
    yield from table(
        ("", ROWS, TILES, f"{ROWS} / {TILES}"),
        ((name, row[ROWS], row[TILES], f"{row[ROWS] / row[TILES]:.2f}") for name, row in rows.items()),
    )
