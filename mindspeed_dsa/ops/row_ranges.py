"""Per-row visible key ranges: the one mask form that covers causal, packed and context-parallel rows."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.ops import checks
from mindspeed_dsa.ops.checks import require
from mindspeed_dsa.platforms.host_pool import upload


@dataclass(frozen=True)
class RowForm:
    """Which keys the rows of a call see, as the host knows it that laid them out.

    With it no operator has to read starts, ends or indices from a device. Without sequences every row of the
    batch is causal up to the last key: row ``t`` of ``query_length`` sees the keys
    ``0 .. t + key_length - query_length``.
    """

    sequences: tuple[int, ...] | None = None
    """Lengths of the packed sequences of the whole batch, one after the other, each of them causal; none of
    them is in two rows of the batch."""

    def __post_init__(self) -> None:
        lengths: object = self.sequences
        require(
            lengths is None
            or (isinstance(lengths, tuple) and all(isinstance(length, Integral) for length in lengths)),
            type(self).__name__,
            lambda: f"sequences is a tuple of integers, the lengths, or None; got {lengths!r}",
        )

    def check(self, operator: str, batch: int, query_length: int, key_length: int) -> None:
        """Raise ``ValueError`` unless a call may have so many rows and keys."""
        if self.sequences is None:
            require(
                query_length <= key_length,
                operator,
                f"{query_length} rows cannot be causal up to the last of {key_length} keys; pass no form",
            )
            return
        lengths = self.sequences
        require(
            query_length == key_length
            and min(lengths, default=0) > 0
            and _fill(lengths, batch, query_length),
            operator,
            lambda: (
                f"sequences of {lengths} rows do not fill {batch} times {query_length} rows and {key_length} "
                "keys; pass no form"
            ),
        )

    def ranges(self, batch: int, query_length: int, key_length: int, device: torch.device) -> Tensor:
        """Return starts and ends of what the rows see: ``[2, batch, query_length]`` int32.

        Raises:
            ValueError: a call may not have so many rows and keys.
        """
        self.check(f"{type(self).__name__}.ranges", batch, query_length, key_length)
        if self.sequences is None:
            ends = torch.arange(key_length - query_length + 1, key_length + 1, dtype=torch.int32)
            starts = torch.zeros_like(ends)
            return upload(torch.stack([starts, ends]), device)[:, None].expand(-1, batch, -1)
        lengths = torch.tensor(self.sequences)
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths).view(batch, query_length)
        starts = starts % query_length
        ends = torch.arange(1, query_length + 1).expand(batch, -1)
        return upload(torch.stack([starts, ends]).to(torch.int32), device)


TO_LAST_KEY = RowForm()
"""Causal rows, the last of which sees every key."""


def _fill(lengths: tuple[int, ...], batch: int, query_length: int) -> bool:
    """Return whether sequences fill every row of the batch, none of them lying in two."""
    at = 0
    for length in lengths:
        at += length
        if at > query_length:
            return False
        at %= query_length
    return at == 0 and sum(lengths) == batch * query_length


class Ranges(NamedTuple):
    """The keys that each row sees, ``starts <= s < ends``."""

    starts: Tensor
    """``[batch, query_length]`` int32, at least 0."""
    ends: Tensor
    """``[batch, query_length]`` int32, at most the number of keys."""
    plain_causal: bool
    """Whether both are the causal default: known without reading them from a device. False says nothing."""
    form: RowForm | None = None
    """Their form, where the host knows it."""


def visible_ranges(
    operator: str,
    batch: int,
    query_length: int,
    key_length: int,
    starts: Tensor | None,
    ends: Tensor | None,
    device: torch.device,
    form: RowForm | None = None,
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
        form: what the host knows of starts and ends, which are the form's where neither is given; with debug
            checks on they are read and held against it.

    Returns:
        The ranges, cut to ``0 <= starts`` and ``ends <= key_length``. A row with ``starts >= ends`` sees
        nothing.

    Raises:
        ValueError: shapes or dtypes do not fit, or the form is not that of such rows.
    """
    if form is not None:
        form.check(operator, batch, query_length, key_length)
        causal = query_length == key_length and form.sequences in (None, (query_length,) * batch)
        if starts is None and ends is None and not causal:
            starts, ends = form.ranges(batch, query_length, key_length, device)
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
    if plain:
        form = TO_LAST_KEY
    elif form is not None and checks.enabled():
        said = form.ranges(batch, query_length, key_length, device)
        require(
            torch.equal(torch.stack(rows), said),
            operator,
            f"starts and ends are not those of the form that came with them, {form}",
        )
    return Ranges(rows[0], rows[1], plain, form)
