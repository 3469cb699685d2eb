"""Context parallelism: who has how much work, what travels, what hides it, memory and time of a step."""

from __future__ import annotations

from benchmarks.cells import CellCase

CELLS = {
    "balance": "benchmarks.context_parallel.balance",
    "volume": "benchmarks.context_parallel.volume",
    "hiding": "benchmarks.context_parallel.hiding",
    "step": "benchmarks.context_parallel.step",
}
"""By the name that ``--only`` takes: a module."""

run = CellCase("context-parallel", CELLS, "benchmarks.context_parallel.trace")
