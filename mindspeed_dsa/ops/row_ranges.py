"""Per-row visible key ranges: the one mask form that covers causal, packed and context-parallel rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.ops.checks import require


class Ranges(NamedTuple):
    """The keys that each row sees, ``starts <= s < ends``."""

    starts: Tensor
    """``[batch, query_length]`` int32, at least 0."""
    ends: Tensor
    """``[batch, query_length]`` int32, at most the number of keys."""
    plain_causal: bool
    """Whether both are the causal default: known without reading them from a device. False says nothing."""


def visible_ranges(
    operator: str,
    batch: int,
    query_length: int,
    key_length: int,
    starts: Tensor | None,
    ends: Tensor | None,
    device: torch.device,
) -> Ranges:
    """Check the ranges of a call and fill in the causal default.

    Args:
        operator: who to name in an error.
        batch: number of sequences.
        query_length: rows per sequence.
        key_length: keys per sequence.
        starts: ``[query_length]`` or ``[batch, query_length]``, first visible key of each row, or None for 0.
        ends: same shape, one past the last visible key, or None for causal rows.
        device: where the result lives.

    Returns:
        The ranges, cut to ``0 <= starts`` and ``ends <= key_length``. A row with ``starts >= ends`` sees
        nothing.
    """
    plain = starts is None and ends is None
    if ends is None:
        require(
            query_length == key_length,
            operator,
            f"which of {key_length} keys each of {query_length} queries sees is ambiguous; pass ends",
        )
        ends = torch.arange(1, query_length + 1, dtype=torch.int32, device=device)
    if starts is None:
        starts = torch.zeros(query_length, dtype=torch.int32, device=device)
    rows = []
    for name, bound in (("starts", starts), ("ends", ends)):
        require(
            bound.shape in ((query_length,), (batch, query_length)) and not bound.is_floating_point(),
            operator,
            f"{name} must be integers [{query_length}] or [{batch}, {query_length}], "
            f"got {bound.dtype} {list(bound.shape)}",
        )
        # Cut first: what int32 does not hold would come out as another position.
        bound = bound.to(device=device, dtype=torch.int64).clamp(0, key_length).to(torch.int32)
        rows.append(bound.expand(batch, query_length))
    return Ranges(rows[0], rows[1], plain)
