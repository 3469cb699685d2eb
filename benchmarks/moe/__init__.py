"""Mixture of experts on two ranks connected by a slow link, in cells that can run separately."""

from __future__ import annotations

from benchmarks.cells import CellCase

CELLS = {
    "overlap": "benchmarks.moe.overlap",
    "balanced": "benchmarks.moe.balanced",
    "permutation": "benchmarks.moe.permutation",
    "grouped": "benchmarks.moe.grouped",
    "placement": "benchmarks.moe.placement",
    "reach": "benchmarks.moe.reach",
}
"""Cell's module by its name for ``--only``."""

run = CellCase("moe", CELLS, "benchmarks.moe.trace")
