"""Models with ``perform_initialization=False`` (``--no-initialization``), to be loaded from a checkpoint.

Megatron then leaves weights uninitialised, which breaks two things. Checkpoints of dense models have no
indexers, so these are initialised here in any case. And up to 0.17 initialisation also marks weights as
tensor parallel; without the mark the gradient norm counts only one rank's shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# -- indexers ------------------------------------------------------------------------------------


@contextmanager
def initialising(config: Any) -> Iterator[None]:
    """Set ``perform_initialization`` in the block, so that modules built there initialise their weights.

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


def mark_rows(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``__init__`` of layers with a weight ``[out, in]`` that is split by rows over ranks."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _mark(self.weight, 0, kwargs.get("stride", 1))

    return __init__


def mark_columns(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``__init__`` of layers with a weight ``[out, in]`` that is split by columns over ranks."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _mark(self.weight, 1, kwargs.get("stride", 1))

    return __init__


def mark_experts(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``GroupedMLP.__init__``: weight1 is ``[hidden, experts * ffn]``, weight2 the transpose."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _mark(self.weight1, 1)
        _mark(self.weight2, 0)

    return __init__
