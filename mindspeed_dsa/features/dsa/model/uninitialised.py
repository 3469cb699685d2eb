"""Models whose weights are to be loaded, and are not initialised: ``perform_initialization=False``.

Megatron's ``--no-initialization`` leaves weights as memory was. Two things of a model are missing then: a
dense model's files have no indexers, whose weights are drawn in any case here; and up to 0.17 split weights
are marked as such where they are initialised, so that the gradient norm counted one rank's parts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# -- indexers ------------------------------------------------------------------------------------


@contextmanager
def initialising(config: Any) -> Iterator[None]:
    """Have modules that are built in the block initialise their weights.

    Args:
        config: Megatron's, of the model.
    """
    before = config.perform_initialization
    config.perform_initialization = True
    try:
        yield
    finally:
        config.perform_initialization = before


def initialise_indexer(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``DSAIndexer.__init__``."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        with initialising(config):
            original(self, config, *args, **kwargs)

    return __init__


# -- split weights -------------------------------------------------------------------------------


def _mark(parameter: Any, dimension: int, stride: int = 1) -> None:
    """Mark a weight as Megatron does, unless that is done or there is none."""
    if parameter is not None and not hasattr(parameter, "tensor_model_parallel"):
        parameter.tensor_model_parallel = True
        parameter.partition_dim = dimension
        parameter.partition_stride = stride


def mark_rows(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``__init__`` of layers with a weight ``[out, in]``, of which a rank has rows."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _mark(self.weight, 0, kwargs.get("stride", 1))

    return __init__


def mark_columns(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``__init__`` of layers with a weight ``[out, in]``, of which a rank has columns."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _mark(self.weight, 1, kwargs.get("stride", 1))

    return __init__


def mark_experts(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``GroupedMLP.__init__``, whose weights are ``[hidden, experts * ffn]`` and the reverse."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _mark(self.weight1, 1)
        _mark(self.weight2, 0)

    return __init__
