"""The attribute that makes Megatron average a parameter's gradient over tensor parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def average_over_tensor_parallel_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``DSAIndexer.__init__``: mark parameters for Megatron's average over ranks.

    The indexer sees the gathered sequence, and its target is summed over all heads: each rank holds the
    complete gradient. The attribute takes precedence over ``sequence_parallel``, which would sum these
    copies.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for parameter in self.parameters():
            parameter.average_gradients_across_tp_domain = True

    return __init__
