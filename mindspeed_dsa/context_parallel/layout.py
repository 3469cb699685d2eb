"""Layouts of a sequence's tokens (rows) over context parallel ranks, and shifts by one token across ranks."""

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
    """Assignment of a sequence's tokens to ranks, the same number to all. Equal layouts must hash equally."""

    def __hash__(self) -> int: ...

    @property
    def ranks(self) -> int:
        """Context parallel size."""

    def rows_of_rank(self, rank: int, length: int) -> Tensor:
        """Return the sequence positions of a rank's tokens.

        Args:
            rank: index in the context parallel group.
            length: number of tokens of the whole sequence.

        Returns:
            Ascending positions, int64 ``[length / ranks]`` on the CPU.

        Raises:
            ValueError: the length cannot be divided evenly.
        """


@dataclass(frozen=True)
class Zigzag:
    """Repeated zigzag: of every ``2c`` consecutive blocks, rank ``r`` gets blocks ``r`` and ``2c - 1 - r``.

    In causal attention the cost of a query is proportional to its position, so the two blocks of every rank
    cost the same in total. Megatron's own layout is a single zigzag of ``2c`` blocks. In sparse attention
    only the first ``topk`` queries are cheaper; small blocks spread them over the ranks.

    Attributes:
        ranks: context parallel size ``c``.
        block_rows: number of tokens per block; 0: Megatron's layout.
    """

    ranks: int
    block_rows: int = 0

    def rows_of_rank(self, rank: int, length: int) -> Tensor:
        """Return the positions of a rank's tokens; see :class:`Layout`."""
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


@dataclass(frozen=True)
class Contiguous:
    """Layout in which each rank has one run of consecutive tokens.

    Attributes:
        ranks: context parallel size.
    """

    ranks: int

    def rows_of_rank(self, rank: int, length: int) -> Tensor:
        """Return the positions of a rank's tokens; see :class:`Layout`."""
        rows, rest = divmod(length, self.ranks)
        if rest:
            raise ValueError(
                f"a sequence of {length} rows cannot be dealt evenly to {self.ranks} context parallel ranks; "
                f"use a multiple of {self.ranks}"
            )
        return torch.arange(rank * rows, (rank + 1) * rows)


def rows_of_all(layout: Layout, length: int) -> Tensor:
    """Return the positions of all ranks' tokens, int64 ``[ranks, length / ranks]``."""
    return torch.stack([layout.rows_of_rank(rank, length) for rank in range(layout.ranks)])


def split(whole: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    """Slice a rank's tokens from a tensor that has the whole sequence along ``dim``."""
    return whole.index_select(dim, upload(layout.rows_of_rank(rank, whole.size(dim)), whole.device))


# -- rows of padding ---------------------------------------------------------------------------


def counted_rows(padding: Padding, rows: int, rank: int, before: int = 0) -> Tensor | None:
    """Return a mask of a rank's tokens that are data, or ``None`` if there is no padding.

    Args:
        padding: padding of the job's sequences. Sequences of another length are assumed to have no padding.
        rows: number of tokens on the context parallel rank.
        rank: index in the context parallel group.
        before: number of tokens at the end of the data to exclude as well.

    Returns:
        Mask, bool ``[rows]`` on the CPU.
    """
    if not padding.rows or rows * padding.ranks != padding.length:
        return None
    return _counted_rows(padding, rank, before)


def data_rows(padding: Padding, states: Tensor, sequence_parallel: bool, state: Any) -> Tensor | None:
    """Return a mask of the tokens in ``states`` that are data, or ``None`` if there is no padding.

    Args:
        padding: padding of the job's sequences.
        states: hidden states of the sequence or of this rank's shard, ``[rows, batch, ...]``.
        sequence_parallel: whether tensor parallel ranks split the tokens.
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
    """Return the indices of rows to send, of rows at ends of runs, and of their successors."""
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
    """Return the next token for each of this rank's tokens, zeros after the last one. Collective.

    Args:
        tensor: this rank's tokens along ``dim``; gradients are not supported.
        dim: dimension of the tokens.
        group: context parallel group.
        layout: assignment of tokens to ranks.
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
