"""Products of hidden states that an indexer finds computed when its turn comes."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mindspeed_dsa.megatron.attribute_override import AttributeOverride, Function


class Projected(NamedTuple):
    """Products of one forward.

    Attributes:
        states: hidden states of this rank, ``[sequence, batch, hidden]``, detached.
        rows: those that were projected: the same ones, or all ranks' under sequence parallelism.
        key, weights: the indexer's, ``[rows, batch, ...]``.
        with_graph: whether backward can reach the indexer's weights.
    """

    states: Tensor
    rows: Tensor
    key: Tensor
    weights: Tensor
    with_graph: bool

    @property
    def is_gathered(self) -> bool:
        """Return whether the rows are those of all tensor parallel ranks."""
        return self.rows is not self.states


_projected: WeakKeyDictionary[Any, Projected] = WeakKeyDictionary()
"""By indexer, from an attention's first step to the indexer's own."""


def put(indexer: Any, projected: Projected) -> None:
    """Leave products of one forward for an indexer."""
    _projected[indexer] = projected


def take(indexer: Any, x: Tensor) -> Projected | None:
    """Return the products of these hidden states, once; ``None`` where the indexer has to project.

    Args:
        indexer: Megatron's ``DSAIndexer``.
        x: what it is given, ``[sequence, batch, hidden]``.
    """
    projected = _projected.pop(indexer, None)
    if projected is None or not _are_same(x, projected.states):
        return None
    # In the warm-up stage layers run without a graph, and their indexers with one.
    return None if torch.is_grad_enabled() and not projected.with_graph else projected


def view_of(indexer: Any, projected: Projected) -> AttributeOverride:
    """Return the indexer with the products in place of the two projections."""
    return AttributeOverride(
        indexer,
        linear_wk=Function(lambda _: (projected.key, None)),
        linear_weights_proj=Function(lambda _: (projected.weights, None)),
    )


def _are_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
