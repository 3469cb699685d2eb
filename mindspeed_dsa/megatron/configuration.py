"""One place that refuses what a feature's checks find in Megatron's configurations.

A check is a generator ``check(args, options)`` that yields sentences. The session asks it about a job's
arguments. Jobs without Megatron's parser are asked when a model or an optimizer is built, about its
configuration: :func:`require`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_dsa.feature import Check, Context
from mindspeed_dsa.patches.errors import SettingsError


def require(context: Context[Any], check: Check, *configurations: Any) -> None:
    """Refuse configurations that a feature does not combine with.

    Args:
        context: the feature's.
        check: what to ask.
        configurations: Megatron's; an attribute is read from the first that has it.

    Raises:
        SettingsError: what the check says.
    """
    problems = list(check(_Together(configurations), context.options))
    if problems:
        raise SettingsError(f"{context.feature}: " + "; ".join(problems))


def argument(args: Any, name: str) -> Any:
    """Return one of Megatron's arguments; ``None`` where this namespace or configuration does not have it."""
    return getattr(args, name, None)


def uses_cuda_graphs(args: Any) -> bool:
    """Return whether parts of the model run as CUDA graphs, however a release spells that."""
    implementation = argument(args, "cuda_graph_impl") or "none"
    return bool(
        implementation != "none"
        or argument(args, "enable_cuda_graph")
        or argument(args, "external_cuda_graph")
    )


class _Together:
    """Several configurations as one namespace."""

    def __init__(self, configurations: Sequence[Any]) -> None:
        self._configurations = configurations

    def __getattr__(self, name: str) -> Any:
        for configuration in self._configurations:
            if hasattr(configuration, name):
                return getattr(configuration, name)
        raise AttributeError(name)
