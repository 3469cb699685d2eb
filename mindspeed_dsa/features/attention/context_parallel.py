"""The rows of the sequence that a context parallel rank's queries belong to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


def visible_ends(group: ProcessGroup, rows: int, device: torch.device) -> Tensor | None:
    """For each of a rank's queries, one past the last visible key, in the order of the whole sequence.

    Megatron cuts a sequence into two chunks for each context parallel rank, and rank ``r`` of ``c`` holds
    chunks ``r`` and ``2c - 1 - r``.

    Args:
        group: context parallel ranks.
        rows: queries on this rank, an even number if there are several ranks.
        device: of the result.

    Returns:
        ``[rows]`` int32; None on a single rank, whose rows are plain causal ones.
    """
    size, rank, chunk = group.size(), group.rank(), rows // 2
    if size == 1:
        return None
    within = torch.arange(1, chunk + 1, dtype=torch.int32, device=device)
    return torch.cat([within + rank * chunk, within + (2 * size - 1 - rank) * chunk])
