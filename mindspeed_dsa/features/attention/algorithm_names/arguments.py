"""A job's arguments, in which Megatron finds its own names.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_dsa.context_parallel.algorithms import ALGORITHM, COMM_TYPES
from mindspeed_dsa.features.attention.algorithm_names.options import Options


def wanted(settings: Any) -> bool:
    """Whether a flag of context parallelism was given."""
    return Options.of(settings) != Options()


def name_for_megatron(args: Any) -> Sequence[str]:
    """Write what ``--context-parallel-algo`` says to Megatron's own arguments; ``Feature.rewrite``."""
    algorithms = Options.of(args)
    said = getattr(args, ALGORITHM.dest, None)
    if said is None or algorithms.ranks == 1 or algorithms.names[0] not in COMM_TYPES.values():
        return ()
    changes = []
    names = list(algorithms.names)
    if getattr(args, "cp_comm_type", None) != names:
        args.cp_comm_type = names
        changes.append(f"--context-parallel-algo {said} becomes --cp-comm-type {names[0]}")
    degree = algorithms.ulysses_degree
    if names == ["a2a+p2p"] and degree and algorithms.ranks % degree == 0:
        sizes = [degree, algorithms.ranks // degree]
        if getattr(args, "hierarchical_context_parallel_sizes", None) != sizes:
            args.hierarchical_context_parallel_sizes = sizes
            changes.append(
                f"--ulysses-degree-in-cp {degree} becomes --hierarchical-context-parallel-sizes "
                f"{sizes[0]} {sizes[1]}"
            )
    return tuple(changes)
