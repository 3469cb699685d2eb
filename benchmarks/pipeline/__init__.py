"""Pipeline schedules: simulated figures, and real steps on a few ranks; each cell can be run alone."""

from __future__ import annotations

from benchmarks.cells import CellCase

CELLS = {
    "simulated": "benchmarks.pipeline.simulated",
    "pairs": "benchmarks.pipeline.pairs",
    "recomputed-pairs": "benchmarks.pipeline.recomputed_pairs",
    "halves": "benchmarks.pipeline.halves",
    "recompute": "benchmarks.pipeline.recompute",
    "split": "benchmarks.pipeline.split",
    "dualpipev": "benchmarks.pipeline.dualpipev",
}
"""By the name that ``--only`` takes: a module."""

run = CellCase("pipeline", CELLS)
