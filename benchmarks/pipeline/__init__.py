"""Pipeline schedules: simulated figures, and real steps on a few ranks, in cells that can run separately."""

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
    "loads": "benchmarks.pipeline.loads",
}
"""Cell's module by its name for ``--only``."""

run = CellCase("pipeline", CELLS)
