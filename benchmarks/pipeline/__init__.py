"""Pipeline schedules: simulated figures, and real steps on a few ranks; each cell can be run alone.

A cell is a module with ``run(link, quick) -> Metrics``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

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
    found: dict[str, Any] = {"link": link}
    for name in _chosen(only):
        found.update(import_module(CELLS[name]).run(link, quick))
    return found


def _chosen(only: str | None) -> Sequence[str]:
    names = list(CELLS) if only is None else only.split(",")
    if unknown := [name for name in names if name not in CELLS]:
        raise ValueError(f"pipeline has no cell {', '.join(unknown)}; use {', '.join(CELLS)}")
    return names
