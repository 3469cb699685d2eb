"""Pipeline schedules: simulated figures, and real steps on a few ranks; each cell can be run alone.

A cell is a module with ``run(link, quick) -> Metrics``.
"""

from __future__ import annotations

from benchmarks.cells import run_cells
from benchmarks.registry import Metrics

RATE = "2gbit"
CELLS = {
    "simulated": "benchmarks.pipeline.simulated",
    "pairs": "benchmarks.pipeline.pairs",
    "halves": "benchmarks.pipeline.halves",
    "recompute": "benchmarks.pipeline.recompute",
}
"""By the name that ``--only`` takes: a module."""


def run(device: str, quick: bool = False, link: str = RATE, only: str | None = None) -> Metrics:
    """The entries of all cells; link beds connect processes on the host's processor, for any device.

    Args:
        device: not used.
        quick: tiny problems.
        link: rate of the link.
        only: names of cells with commas between.

    Raises:
        ValueError: an unknown cell.
    """
    return run_cells("pipeline", CELLS, only, link, quick)
