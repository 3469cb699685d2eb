"""One name for each context parallel algorithm, whoever gave it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.context_parallel.algorithms import (
    ALGORITHM,
    COMM_TYPES,
    MEGATRON_FLAGS,
    ULYSSES_DEGREE,
    Algorithms,
    problems,
)
from mindspeed_dsa.feature import Feature
from mindspeed_dsa.patches.spec import Patch


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


@dataclass(frozen=True)
class Options(Algorithms):
    """The algorithms of a job's layers."""


def check_context_parallel(args: Any, options: Options) -> Iterator[str]:
    """Report what :func:`problems` finds; absent arguments are not checked."""
    yield from problems(args, options)


FEATURE = Feature(
    name="context-parallel",
    summary="Takes MindSpeed's names of context parallel algorithms beside Megatron's, for all layers or one "
    "per layer.",
    flags=(ALGORITHM, ULYSSES_DEGREE, *MEGATRON_FLAGS),
    active=wanted,
    options=Options.of,
    rewrite=name_for_megatron,
    check=check_context_parallel,
    doc="context-parallel.md",
    patches=(
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            "wrap",
            "mindspeed_dsa.features.attention.algorithm_names.layers:count_layers_from_one",
            "a list of --cp-comm-type is read one layer too late, and past its end by the last layer",
            params=("config", "layer_number"),
            versions=">=0.12.1,<0.17",
        ),
    ),
)
