"""Which rows of a sequence each context parallel rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Layout(Protocol):
    """Gives every row of a sequence to one of the ranks, the same number to each."""

    @property
    def ranks(self) -> int:
        """Context parallel size."""

    def rows_of_rank(self, rank: int, length: int) -> Tensor:
        """Positions in the sequence of a rank's rows, in the order in which it holds them.

        Args:
            rank: in the context parallel group.
            length: rows of the whole sequence.

        Returns:
            ``[length / ranks]`` int64 on the CPU, ascending.

        Raises:
            ValueError: the length cannot be dealt out.
        """


@dataclass(frozen=True)
class Zigzag:
    """Blocks dealt to the ranks and back, over and over: rank ``r`` gets blocks ``r`` and ``2c - 1 - r`` of
    each ``2c``.

    A row of causal attention costs as much as its position, so that both blocks of a rank cost the same in
    sum. Megatron's own layout has ``2c`` blocks in the whole sequence. In a sparse layer only the rows below
    ``topk`` are short, and they lie in the first blocks: small blocks spread these as well.

    Attributes:
        ranks: context parallel size ``c``.
        block_rows: rows of a block; 0: as Megatron.
    """

    ranks: int
    block_rows: int = 0

    def rows_of_rank(self, rank: int, length: int) -> Tensor:
        """See :class:`Layout`."""
        if self.ranks == 1:
            return torch.arange(length)
        unit = 2 * self.ranks * max(self.block_rows, 1)
        if length % unit:
            raise ValueError(
                f"a sequence of {length} rows cannot be dealt to {self.ranks} context parallel ranks in two "
                f"blocks{f' of {self.block_rows} rows' if self.block_rows else ''} each; use a multiple of "
                f"{unit}"
            )
        block = self.block_rows or length // unit
        blocks = torch.arange(length).view(-1, 2 * self.ranks, block)
        return blocks[:, [rank, 2 * self.ranks - 1 - rank]].flatten()


def rows_of_all(layout: Layout, length: int) -> Tensor:
    """``[ranks, length / ranks]`` int64: :meth:`Layout.rows_of_rank` of each."""
    return torch.stack([layout.rows_of_rank(rank, length) for rank in range(layout.ranks)])


def split(whole: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    """A rank's rows of a tensor that has those of the whole sequence along ``dim``."""
    return whole.index_select(dim, layout.rows_of_rank(rank, whole.size(dim)).to(whole.device))


def join(parts: list[Tensor], layout: Layout, dim: int) -> Tensor:
    """The whole sequence from every rank's rows, in its own order; what :func:`split` undoes."""
    together = torch.cat(parts, dim=dim)
    order = rows_of_all(layout, together.size(dim)).flatten().argsort()
    return together.index_select(dim, order.to(together.device))
