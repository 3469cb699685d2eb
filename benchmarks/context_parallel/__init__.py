"""Context parallelism: balance of work, communication volume, overlap, and memory and time of a step."""

from __future__ import annotations

from benchmarks.cells import CellCase

CELLS = {
    "balance": "benchmarks.context_parallel.balance",
    "volume": "benchmarks.context_parallel.volume",
    "hiding": "benchmarks.context_parallel.hiding",
    "step": "benchmarks.context_parallel.step",
}
"""Cell's module by its name for ``--only``."""

run = CellCase("context-parallel", CELLS, "benchmarks.context_parallel.trace")
