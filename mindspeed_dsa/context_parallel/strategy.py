"""Base class of context parallel attention: the tokens of each rank, and the exchange between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.layout import Layout, Zigzag, split


@dataclass(frozen=True)
class Exchanged:
    """Inputs of one rank's attention after the exchange, in Megatron's layout (sequence first).

    Attributes:
        query: queries, ``[rows, b, heads, dim]``.
        key: keys in sequence order from position 0 on, ``[keys, b, heads, dim]``.
        value: values, ``[keys, b, heads, value_dim]``.
        positions: sequence positions of the queries, int64 ``[rows]``. A query sees the keys up to its
            position. ``None``: queries and keys are the whole sequence, with a plain causal mask.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor | None = None


Inner = Callable[[Exchanged], Tensor]
"""Differentiable attention on one rank; returns ``[rows, b, heads, value_dim]``."""


class ContextParallelStrategy(ABC):
    """Context parallel algorithm of one attention layer.

    A subclass implements :meth:`exchange`, which runs before attention, and optionally :meth:`merge`, which
    runs after it. An algorithm with several attention steps, such as a ring, overrides :meth:`attend`.

    Args:
        group: context parallel group.
        layout: assignment of tokens to ranks; default: Megatron's zigzag.
    """

    def __init__(self, group: ProcessGroup, layout: Layout | None = None) -> None:
        self.group = group
        self.layout: Layout = Zigzag(group.size()) if layout is None else layout

    @property
    def rank(self) -> int:
        """Context parallel rank of this process."""
        return self.group.rank()

    @property
    def ranks(self) -> int:
        """Context parallel size."""
        return self.group.size()

    def split(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Slice this rank's tokens from a tensor that has the whole sequence along ``dim``."""
        return split(whole, self.layout, self.rank, dim)

    def positions(self, rows: int, device: torch.device | None = None) -> Tensor:
        """Return the sequence positions of this rank's tokens, ``[rows]`` int64.

        Args:
            rows: number of tokens on this rank.
            device: device of the result; default: CPU.
        """
        return self.layout.rows_of_rank(self.rank, rows * self.ranks).to(device or "cpu")

    @abstractmethod
    def exchange(self, query: Tensor, key: Tensor, value: Tensor) -> Exchanged:
        """Gather or exchange the tensors that this rank's attention needs. Differentiable.

        Args:
            query: this rank's queries, ``[rows, b, heads, dim]``.
            key: this rank's keys, ``[rows, b, heads, dim]``.
            value: this rank's values, ``[rows, b, heads, value_dim]``.
        """

    def merge(self, out: Tensor) -> Tensor:
        """Return attention's output for this rank's tokens and all heads, ``[rows, b, heads, value_dim]``."""
        return out

    def attend(self, inner: Inner, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute causal attention from this rank's queries to the whole sequence.

        Args:
            inner: attention function of a single rank.
            query: this rank's queries, ``[rows, b, heads, dim]``.
            key: this rank's keys.
            value: this rank's values.

        Returns:
            Attention output, ``[rows, b, heads, value_dim]``.
        """
        return self.merge(inner(self.exchange(query, key, value)))
