"""Patches for ``perform_initialization=False`` (``--no-initialization``), used before a checkpoint is loaded.

Megatron then leaves weights uninitialised, which breaks two things. First, checkpoints of dense models have
no indexers, so this module always initialises indexers. Second, up to 0.17 the initialisation also marks
weights as tensor parallel. Without this mark the gradient norm counts only one rank's shards, so this module
sets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# -- indexers ------------------------------------------------------------------------------------


@contextmanager
def initialising(config: Any) -> Iterator[None]:
    """Context with ``perform_initialization`` set, so that modules built inside initialise their weights.

    Args:
        config: Megatron's model configuration.
    """
    before = config.perform_initialization
    config.perform_initialization = True
    try:
        yield
    finally:
        config.perform_initialization = before


def initialise_indexer(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``DSAIndexer.__init__`` so that it always initialises its weights."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        with initialising(config):
            original(self, config, *args, **kwargs)

    return __init__


# -- split weights -------------------------------------------------------------------------------


def _mark(parameter: Any, dimension: int, stride: int = 1) -> None:
    """Set Megatron's tensor parallel attributes on a weight, if it exists and has none."""
    if parameter is not None and not hasattr(parameter, "tensor_model_parallel"):
        parameter.tensor_model_parallel = True
        parameter.partition_dim = dimension
        parameter.partition_stride = stride


def _marking(dimension: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of ``__init__`` of layers whose weight ``[out, in]`` is split along a dimension."""

    def mark(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            _mark(self.weight, dimension, kwargs.get("stride", 1))

        return __init__

    return mark


mark_rows, mark_columns = _marking(0), _marking(1)


def mark_experts(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``GroupedMLP.__init__``: mark weight1 ``[hidden, experts * ffn]`` and weight2 (transposed)."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _mark(self.weight1, 1)
        _mark(self.weight2, 0)

    return __init__
