"""Mixture of experts on two ranks connected by a slow link: cells of their own, each runnable alone."""

from __future__ import annotations

from benchmarks.cells import CellCase

CELLS = {
    "overlap": "benchmarks.moe.overlap",
    "balanced": "benchmarks.moe.balanced",
    "permutation": "benchmarks.moe.permutation",
    "grouped": "benchmarks.moe.grouped",
    "placement": "benchmarks.moe.placement",
}
"""By the name that ``--only`` takes: a module."""

run = CellCase("moe", CELLS, "benchmarks.moe.trace")
