"""Context parallelism: who has how much work, what travels, what hides it, memory and time of a step.

A cell is a module with ``run(link, quick) -> Metrics``.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from benchmarks.cells import run_cells
from benchmarks.registry import Metrics

RATE = "2gbit"
CELLS = {
    "balance": "benchmarks.context_parallel.balance",
    "volume": "benchmarks.context_parallel.volume",
    "hiding": "benchmarks.context_parallel.hiding",
    "step": "benchmarks.context_parallel.step",
}
"""By the name that ``--only`` takes: a module."""


def run(
    device: str, quick: bool = False, link: str = RATE, only: str | None = None, trace: str | None = None
) -> Metrics:
    """The entries of all cells; link beds connect processes on the host's processor, for any device.

    Args:
        device: not used.
        quick: tiny problems.
        link: rate of the link.
        only: names of cells with commas between.
        trace: file for the trace of a layer's step; an image is written next to it.

    Raises:
        ValueError: an unknown cell.
    """
    found = run_cells("context-parallel", CELLS, only, link, quick)
    if trace:
        import_module("benchmarks.context_parallel.trace").write(link, quick, Path(trace))
    return found
