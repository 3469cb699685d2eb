"""Layouts: the rows (tokens) of a sequence on each context parallel rank, and their redistribution."""

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
    """Assignment of a sequence's rows to ranks, equal numbers each. Equal layouts must hash equally."""

    def __hash__(self) -> int: ...

    @property
    def ranks(self) -> int:
        """Context parallel size."""

    def rows_of_rank(self, rank: int, length: int) -> Tensor:
        """Return the positions in the sequence of a rank's rows, in the rank's order.

        Args:
            rank: index in the context parallel group.
            length: rows of the whole sequence.

        Returns:
            Ascending positions, int64 ``[length / ranks]`` on the CPU.

        Raises:
            ValueError: the length cannot be distributed.
        """


@dataclass(frozen=True)
class Zigzag:
    """Repeated zigzag: of every ``2c`` blocks, rank ``r`` gets blocks ``r`` and ``2c - 1 - r``.

    In causal attention a row costs as much as its position, so the two blocks of each rank cost the same in
    total. Megatron's own layout has ``2c`` blocks in the whole sequence. In a sparse layer only the rows
    below ``topk``, in the first blocks, have fewer keys; small blocks distribute these rows too.

    Attributes:
        ranks: context parallel size ``c``.
        block_rows: rows of a block; 0 for Megatron's layout.
    """

    ranks: int
    block_rows: int = 0

    def rows_of_rank(self, rank: int, length: int) -> Tensor:
        """Return a rank's rows; see :class:`Layout`."""
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
        # 16 rows, 2 ranks, blocks of 2: rank 0 gets blocks 0 and 3 of each 4, rows 0 1 6 7 8 9 14 15.
        blocks = torch.arange(length).view(-1, 2 * self.ranks, block)
        return blocks[:, [rank, 2 * self.ranks - 1 - rank]].flatten()


def rows_of_all(layout: Layout, length: int) -> Tensor:
    """Return :meth:`Layout.rows_of_rank` of all ranks, int64 ``[ranks, length / ranks]``."""
    return torch.stack([layout.rows_of_rank(rank, length) for rank in range(layout.ranks)])


def split(whole: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    """Return a rank's rows of a tensor that has the whole sequence along ``dim``."""
    return whole.index_select(dim, upload(layout.rows_of_rank(rank, whole.size(dim)), whole.device))


def join(parts: list[Tensor], layout: Layout, dim: int) -> Tensor:
    """Join all ranks' rows to the whole sequence in its order; inverse of :func:`split`."""
    # rows_of_all gives the position of each row; argsort inverts that permutation.
    together = torch.cat(parts, dim=dim)
    order = rows_of_all(layout, together.size(dim)).flatten().argsort()
    return together.index_select(dim, upload(order, together.device))


# -- rows of padding ---------------------------------------------------------------------------


def counted_rows(padding: Padding, rows: int, rank: int, before: int = 0) -> Tensor | None:
    """Return a mask of a rank's rows that are data, or ``None`` if there is no padding.

    Args:
        padding: padding of the job's sequences. Sequences of another length have none.
        rows: number of rows of the context parallel rank.
        rank: index in the context parallel group.
        before: number of the data's last rows to mask as well.

    Returns:
        Mask, bool ``[rows]`` on the CPU.
    """
    if not padding.rows or rows * padding.ranks != padding.length:
        return None
    return _counted_rows(padding, rank, before)


def data_rows(padding: Padding, states: Tensor, sequence_parallel: bool, state: Any) -> Tensor | None:
    """Return a mask of the rows of ``states`` that are data, or ``None`` if there is no padding.

    Args:
        padding: padding of the job's sequences.
        states: hidden states of whole sequences or of this rank's part of them, ``[rows, batch, ...]``.
        sequence_parallel: whether tensor parallel ranks split the rows.
        state: Megatron's ``parallel_state``.

    Returns:
        Mask, bool ``[rows, batch]`` on the device of the states.
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
    rows_per_rank = padding.length // padding.ranks
    if padding.is_pack:
        is_last = rank == padding.ranks - 1
        return torch.arange(rows_per_rank) < rows_per_rank - (padding.rows if is_last else 0)
    layout = Zigzag(padding.ranks, padding.block_rows)
    return layout.rows_of_rank(rank, padding.length) < padding.tokens - before


# -- shift by one position, across ranks --------------------------------------------------------


@lru_cache(maxsize=32)
def _plan_of_roll(layout: Layout, length: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows to send, the rows with their successor on another rank, and the successors' places."""
    # A place indexes the sent rows of all ranks, equally many per rank, with one zero row appended.
    rows = rows_of_all(layout, length)
    # True at the first row of each run of consecutive positions.
    begins = rows != torch.nn.functional.pad(rows[:, :-1] + 1, (1, 0), value=-1)
    # Largest number of runs on a rank.
    most = int(begins.sum(dim=1).max())
    # Send the first row of each run. Ranks with fewer runs send arbitrary rows to fill up.
    sent = begins.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    # Place of each position among the sent rows; the zero row, appended last, serves all others.
    place = torch.full((length + 1,), layout.ranks * most)
    place[rows.gather(1, sent).flatten()] = torch.arange(layout.ranks * most)
    ends = torch.cat([begins[rank, 1:], torch.ones(1, dtype=torch.bool)]).nonzero().flatten()
    following = rows[rank, ends] + 1
    return sent[rank], ends, place[following]


def rolled(tensor: Tensor, dim: int, group: ProcessGroup, layout: Layout) -> Tensor:
    """Return the successor of each of this rank's rows, zeros after the last row. Collective over the group.

    Args:
        tensor: this rank's rows along ``dim``; gradients are not supported.
        dim: dimension of the rows.
        group: context parallel group.
        layout: layout of the rows.
    """
    length = tensor.size(dim) * layout.ranks
    sent, ends, following = (
        upload(index, tensor.device) for index in _plan_of_roll(layout, length, group.rank())
    )
    mine = tensor.index_select(dim, sent).movedim(dim, 0).contiguous()
    all_ranks = [torch.empty_like(mine) for _ in range(layout.ranks)]
    dist.all_gather(all_ranks, mine, group=group)
    table = torch.cat([*all_ranks, torch.zeros_like(mine[:1])])
    # Within a run the successor is the next local row; only the ends of runs need rows of other ranks.
    result = tensor.roll(-1, dim)
    return result.index_copy_(dim, ends, table.index_select(0, following).movedim(0, dim))
