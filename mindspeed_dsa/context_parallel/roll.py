"""Rows moved by one position in the sequence, whose neighbours may be on other ranks."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.layout import Layout, rows_of_all


@lru_cache(maxsize=32)
def _plan(layout: Layout, length: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Own rows that other ranks may need, own rows whose successor is elsewhere, and where that is found.

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
    """For each of a rank's rows the one after it in the sequence, zeros after the last; a collective.

    Args:
        tensor: this rank's rows along ``dim``; no gradient.
        dim: which one.
        group: context parallel ranks.
        layout: who has which rows.
    """
    length = tensor.size(dim) * layout.ranks
    sent, ends, found = (index.to(tensor.device) for index in _plan(layout, length, group.rank()))
    mine = tensor.index_select(dim, sent).movedim(dim, 0).contiguous()
    all_ranks = [torch.empty_like(mine) for _ in range(layout.ranks)]
    dist.all_gather(all_ranks, mine, group=group)
    table = torch.cat([*all_ranks, torch.zeros_like(mine[:1])])
    result = tensor.roll(-1, dim)
    return result.index_copy_(dim, ends, table.index_select(0, found).movedim(0, dim))
