"""Strategy of context parallel attention: which rows a rank has, and what it tells the others."""

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
    """Tensors that one rank attends with after the exchange, in Megatron's layout, sequence first.

    Attributes:
        query: ``[rows, b, heads, dim]``.
        key: ``[keys, b, heads, dim]``, in the order of the sequence, from its first row.
        value: ``[keys, b, heads, value_dim]``.
        positions: ``[rows]`` int64, of the queries in the sequence: a row sees the keys up to its own. None:
            queries and keys are the whole sequence, plain causal rows.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor | None = None


Inner = Callable[[Exchanged], Tensor]
"""An attention on one rank: ``[rows, b, heads, value_dim]``, differentiable."""


class ContextParallelStrategy(ABC):
    """One algorithm of one attention layer.

    A subclass says what is exchanged before attention and what is brought back after it; an algorithm that
    attends in several steps, like a ring, overrides :meth:`attend` as a whole.

    Args:
        group: context parallel ranks.
        layout: which rows each of them holds; default: Megatron's zigzag.
    """

    def __init__(self, group: ProcessGroup, layout: Layout | None = None) -> None:
        self.group = group
        self.layout: Layout = Zigzag(group.size()) if layout is None else layout

    @property
    def rank(self) -> int:
        """This process among the ranks."""
        return self.group.rank()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.group.size()

    def split(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's rows of a tensor that has those of the whole sequence along ``dim``."""
        return split(whole, self.layout, self.rank, dim)

    def positions(self, rows: int, device: torch.device | None = None) -> Tensor:
        """Return the positions of this rank's rows in the sequence, ``[rows]`` int64.

        Args:
            rows: how many this rank has.
            device: of the result.
        """
        return self.layout.rows_of_rank(self.rank, rows * self.ranks).to(device or "cpu")

    @abstractmethod
    def exchange(self, query: Tensor, key: Tensor, value: Tensor) -> Exchanged:
        """Bring here what this rank's attention reads; differentiable.

        Args:
            query: ``[rows, b, heads, dim]``, this rank's rows.
            key: ``[rows, b, heads, dim]``, likewise.
            value: ``[rows, b, heads, value_dim]``, likewise.
        """

    def merge(self, out: Tensor) -> Tensor:
        """Return this rank's rows with all heads, ``[rows, b, heads, value_dim]``, of attention's output."""
        return out

    def attend(self, inner: Inner, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally with this rank's rows to the whole sequence; arguments as of :meth:`exchange`.

        Args:
            inner: attention on one rank.
            query: this rank's rows.
            key: likewise.
            value: likewise.

        Returns:
            ``[rows, b, heads, value_dim]``.
        """
        return self.merge(inner(self.exchange(query, key, value)))
