"""Megatron's refusals of DSA under context parallelism, lifted.

Imports nothing of Megatron: fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def accept_context_parallel_dsa(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__``, which asserts one context parallel rank for DSA."""

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        ranks = self.context_parallel_size
        if self.experimental_attention_variant == "dsa":
            self.context_parallel_size = 1
        try:
            original(self, *args, **kwargs)
        finally:
            self.context_parallel_size = ranks

    return __post_init__


def mark_gradients_of_own_rows(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``DSAIndexer.__init__``: under sequence parallelism what projects a rank's own rows has a part
    of the gradient, to be summed over tensor parallel ranks; the rest sees all rows.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        groups = self.pg_collection
        if groups.cp.size() > 1 and self.config.sequence_parallel and groups.tp.size() > 1:
            sum_gradients_of_own_rows(self)

    return __init__


def sum_gradients_of_own_rows(indexer: Any) -> None:
    """Mark the parameters of key and weights, for Megatron's sum over tensor parallel ranks."""
    for module in (indexer.linear_wk, indexer.k_norm, indexer.linear_weights_proj):
        for parameter in module.parameters():
            parameter.average_gradients_across_tp_domain = False
            parameter.sequence_parallel = True
