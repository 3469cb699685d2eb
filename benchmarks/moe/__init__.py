"""Mixture of experts on two ranks connected by a slow link: cells of their own, each runnable alone.

A cell is a module with ``run(link, quick) -> Metrics``; its entries join those of the others. To add one, add
a row to :data:`CELLS`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from benchmarks.cells import run_cells
from benchmarks.registry import Metrics

RATE = "2gbit"
CELLS = {
    "overlap": "benchmarks.moe.overlap",
    "balanced": "benchmarks.moe.balanced",
    "permutation": "benchmarks.moe.permutation",
    "grouped": "benchmarks.moe.grouped",
    "placement": "benchmarks.moe.placement",
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
        trace: file for the trace of one layer's step; an image is written next to it.

    Raises:
        ValueError: an unknown cell.
    """
    found = run_cells("moe", CELLS, only, link, quick)
    if trace:
        import_module("benchmarks.moe.trace").write(link, quick, Path(trace))
    return found
