"""Layouts: which rows of a sequence each context parallel rank holds, and rows moved between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.padding import Padding
from mindspeed_dsa.platforms.host_pool import upload


class Layout(Protocol):
    """Assignment of a sequence's rows to ranks, the same number to each; equal ones hash equally."""

    def __hash__(self) -> int: ...

    @property
    def ranks(self) -> int:
        """Context parallel size."""

    def rows_of_rank(self, rank: int, length: int) -> Tensor:
        """Return the positions in the sequence of a rank's rows, in the order in which it holds them.

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
        """Do as :class:`Layout` says."""
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
    """Return ``[ranks, length / ranks]`` int64: :meth:`Layout.rows_of_rank` of each."""
    return torch.stack([layout.rows_of_rank(rank, length) for rank in range(layout.ranks)])


def split(whole: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    """Return a rank's rows of a tensor that has those of the whole sequence along ``dim``."""
    return whole.index_select(dim, upload(layout.rows_of_rank(rank, whole.size(dim)), whole.device))


def join(parts: list[Tensor], layout: Layout, dim: int) -> Tensor:
    """Join every rank's rows to the whole sequence, in its own order; :func:`split` undoes it."""
    together = torch.cat(parts, dim=dim)
    order = rows_of_all(layout, together.size(dim)).flatten().argsort()
    return together.index_select(dim, upload(order, together.device))


# -- rows of padding ---------------------------------------------------------------------------


def counted_rows(padding: Padding, rows: int, rank: int, before: int = 0) -> Tensor | None:
    """Return which of a rank's rows are data; None where all are, as in sequences of other lengths.

    Args:
        padding: of the job's sequences.
        rows: of the context parallel rank.
        rank: in the context parallel group.
        before: leave out so many of the data's last rows as well.

    Returns:
        ``[rows]`` bool on the CPU.
    """
    if not padding.rows or rows * padding.ranks != padding.length:
        return None
    return _counted_rows(padding, rank, before)


def data_rows(padding: Padding, states: Tensor, sequence_parallel: bool, state: Any) -> Tensor | None:
    """Return which rows of a rank's states are data; None where all are.

    Args:
        padding: of the job's sequences.
        states: ``[rows, batch, ...]``, whole sequences or this rank's part of them.
        sequence_parallel: tensor parallel ranks have a part of the rows each.
        state: Megatron's ``parallel_state``.

    Returns:
        ``[rows, batch]`` bool, on the device of the states.
    """
    parts = state.get_tensor_model_parallel_world_size() if sequence_parallel else 1
    counted = counted_rows(padding, states.size(0) * parts, state.get_context_parallel_rank())
    if counted is None:
        return None
    if sequence_parallel:
        counted = counted.chunk(parts)[state.get_tensor_model_parallel_rank()]
    return upload(counted, states.device)[:, None].expand(states.shape[:2])


@lru_cache(maxsize=32)
def _counted_rows(padding: Padding, rank: int, before: int) -> Tensor:
    own = padding.length // padding.ranks
    if padding.is_pack:
        is_last = rank == padding.ranks - 1
        return torch.arange(own) < own - (padding.rows if is_last else 0)
    layout = Zigzag(padding.ranks, padding.block_rows)
    return layout.rows_of_rank(rank, padding.length) < padding.tokens - before


# -- rows moved by one position, whose neighbours may be on other ranks ------------------------


@lru_cache(maxsize=32)
def _plan_of_roll(layout: Layout, length: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find own rows that others may need, own rows whose successor is elsewhere, and where that lies.

    The last is an index into what all ranks have sent, each the same number of rows, and one zero after it.
    """
    rows = rows_of_all(layout, length)
    begins = rows != torch.nn.functional.pad(rows[:, :-1] + 1, (1, 0), value=-1)
    most = int(begins.sum(dim=1).max())
    # Each rank's first rows of its runs; other rows fill up those of a rank with fewer runs.
    sent = begins.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    place = torch.full((length + 1,), layout.ranks * most)
    place[rows.gather(1, sent).flatten()] = torch.arange(layout.ranks * most)
    ends = torch.cat([begins[rank, 1:], torch.ones(1, dtype=torch.bool)]).nonzero().flatten()
    following = rows[rank, ends] + 1
    return sent[rank], ends, place[following]


def rolled(tensor: Tensor, dim: int, group: ProcessGroup, layout: Layout) -> Tensor:
    """Return the row after each of a rank's rows in the sequence, zeros after the last; a collective.

    Args:
        tensor: this rank's rows along ``dim``; no gradient.
        dim: which one.
        group: context parallel ranks.
        layout: who has which rows.
    """
    length = tensor.size(dim) * layout.ranks
    sent, ends, following = (
        upload(index, tensor.device) for index in _plan_of_roll(layout, length, group.rank())
    )
    mine = tensor.index_select(dim, sent).movedim(dim, 0).contiguous()
    all_ranks = [torch.empty_like(mine) for _ in range(layout.ranks)]
    dist.all_gather(all_ranks, mine, group=group)
    table = torch.cat([*all_ranks, torch.zeros_like(mine[:1])])
    result = tensor.roll(-1, dim)
    return result.index_copy_(dim, ends, table.index_select(0, following).movedim(0, dim))
