"""Strategy of context parallel attention: the rows of each rank, and the exchange between ranks."""

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
    """Tensors for one rank's attention after the exchange, in Megatron's layout, sequence first.

    Attributes:
        query: query rows, ``[rows, b, heads, dim]``.
        key: key rows in sequence order from the first row on, ``[keys, b, heads, dim]``.
        value: value rows, ``[keys, b, heads, value_dim]``.
        positions: positions of the queries in the sequence, int64 ``[rows]``. A query sees the keys up to its
            own. ``None``: queries and keys are the whole sequence, with a plain causal mask.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor | None = None


Inner = Callable[[Exchanged], Tensor]
"""Differentiable attention on one rank; returns ``[rows, b, heads, value_dim]``."""


class ContextParallelStrategy(ABC):
    """Context parallel algorithm of one attention layer.

    A subclass defines the exchange before attention, and optionally the merge after it. An algorithm with
    several attention steps, such as a ring, overrides :meth:`attend` as a whole.

    Args:
        group: context parallel group.
        layout: layout of the rows; default: Megatron's zigzag.
    """

    def __init__(self, group: ProcessGroup, layout: Layout | None = None) -> None:
        self.group = group
        self.layout: Layout = Zigzag(group.size()) if layout is None else layout

    @property
    def rank(self) -> int:
        """Index of this process in the group."""
        return self.group.rank()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.group.size()

    def split(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's rows of a tensor that has the whole sequence along ``dim``."""
        return split(whole, self.layout, self.rank, dim)

    def positions(self, rows: int, device: torch.device | None = None) -> Tensor:
        """Return the positions of this rank's rows in the sequence, ``[rows]`` int64.

        Args:
            rows: number of rows of this rank.
            device: device of the result; default: CPU.
        """
        return self.layout.rows_of_rank(self.rank, rows * self.ranks).to(device or "cpu")

    @abstractmethod
    def exchange(self, query: Tensor, key: Tensor, value: Tensor) -> Exchanged:
        """Collect the tensors that this rank's attention reads. Differentiable.

        Args:
            query: this rank's queries, ``[rows, b, heads, dim]``.
            key: this rank's keys, ``[rows, b, heads, dim]``.
            value: this rank's values, ``[rows, b, heads, value_dim]``.
        """

    def merge(self, out: Tensor) -> Tensor:
        """Return this rank's rows of attention's output with all heads, ``[rows, b, heads, value_dim]``."""
        return out

    def attend(self, inner: Inner, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally with this rank's rows to the whole sequence.

        Args:
            inner: attention on one rank.
            query: this rank's queries, shaped as for :meth:`exchange`.
            key: this rank's keys.
            value: this rank's values.

        Returns:
            Attention output, ``[rows, b, heads, value_dim]``.
        """
        return self.merge(inner(self.exchange(query, key, value)))
