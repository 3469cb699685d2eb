"""Visible key range per query row, which describes causal, packed and context-parallel masks alike."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.ops import checks
from mindspeed_dsa.ops.checks import require
from mindspeed_dsa.platforms.host_pool import upload


@dataclass(frozen=True)
class RowForm:
    """Host-side description of the keys that each query row of a call sees.

    With a form, no operator has to read starts, ends or indices from a device. If ``sequences`` is None, the
    mask is causal, aligned to the last key: row ``t`` of ``query_length`` sees the keys
    ``0 .. t + key_length - query_length``.
    """

    sequences: tuple[int, ...] | None = None
    """Lengths of the packed causal sequences of the whole batch, one after the other. No sequence spans two
    rows of the batch."""

    @classmethod
    def of_cu_seqlens(cls, cu_seqlens: Tensor) -> RowForm:
        """Build the form of packed sequences from FlashAttention's ``cu_seqlens``.

        Synchronizes with the device that holds the bounds. Empty sequences are dropped. If no sequence
        remains, the result is ``RowForm()``.

        Args:
            cu_seqlens: ``[sequences + 1]`` int32 or int64: 0, then the end of each sequence, which is the
                start of the next.

        Raises:
            ValueError: the bounds have another shape or dtype, do not begin with 0, or descend.
        """
        return cls(_lengths(f"{cls.__name__}.of_cu_seqlens", cu_seqlens) or None)

    def __post_init__(self) -> None:
        lengths: object = self.sequences
        require(
            lengths is None
            or (isinstance(lengths, tuple) and all(isinstance(length, Integral) for length in lengths)),
            type(self).__name__,
            lambda: f"sequences is a tuple of integers, the lengths, or None; got {lengths!r}",
        )

    def check(self, operator: str, batch: int, query_length: int, key_length: int) -> None:
        """Raise ``ValueError`` unless the form fits a call with these numbers of rows and keys."""
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
        """Return starts and ends of the rows' visible keys: ``[2, batch, query_length]`` int32.

        Raises:
            ValueError: the form does not fit these numbers of rows and keys.
        """
        self.check(f"{type(self).__name__}.ranges", batch, query_length, key_length)
        if self.sequences is None:
            ends = torch.arange(key_length - query_length + 1, key_length + 1, dtype=torch.int32)
            starts = torch.zeros_like(ends)  # [query_length]
            return upload(torch.stack([starts, ends]), device)[:, None].expand(-1, batch, -1)
        lengths = torch.tensor(self.sequences)  # [sequences]
        # Start of the sequence of each row, counted over the whole batch: [batch, query_length]
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths).view(batch, query_length)
        starts = starts % query_length
        ends = torch.arange(1, query_length + 1).expand(batch, -1)  # [batch, query_length]
        return upload(torch.stack([starts, ends]).to(torch.int32), device)  # [2, batch, query_length]


TO_LAST_KEY = RowForm()
"""Form of causal rows whose last row sees every key."""


def form_of(
    operator: str,
    cu_seqlens: Tensor | None,
    form: RowForm | None,
    batch: int,
    query_length: int,
    key_length: int,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
) -> RowForm | None:
    """Return the form of a call, built from ``cu_seqlens`` if that is given.

    Args:
        operator: operator's name in an error.
        cu_seqlens: bounds of the whole batch's sequences, see :meth:`RowForm.of_cu_seqlens`; or None.
        form: form of the call, returned if there is no ``cu_seqlens``.
        batch: batch size.
        query_length: query rows per row of the batch.
        key_length: keys per row of the batch.
        starts: first visible key per row; must be None with ``cu_seqlens``.
        ends: one past the last visible key per row; must be None with ``cu_seqlens``.

    Raises:
        ValueError: ``form``, ``starts`` or ``ends`` is given with ``cu_seqlens``, or the bounds do not fit
            the rows.
    """
    if cu_seqlens is None:
        return form
    require(
        form is None and starts is None and ends is None,
        operator,
        "cu_seqlens says which keys rows see; pass neither form nor starts and ends beside it",
    )
    lengths = _lengths(operator, cu_seqlens)
    rows, end = batch * query_length, sum(lengths)
    require(
        query_length == key_length,
        operator,
        f"cu_seqlens bounds rows and keys alike, got {query_length} rows and {key_length} keys; pass ends",
    )
    require(
        end == rows,
        operator,
        f"cu_seqlens ends at {end}, and {batch} times {query_length} rows at {rows}; give padding behind the "
        "last sequence a bound of its own",
    )
    require(
        _fill(lengths, batch, query_length),
        operator,
        f"cu_seqlens has a sequence in two of the {batch} rows of the batch; pack into a batch of one",
    )
    return RowForm(lengths or None)


def _lengths(operator: str, cu_seqlens: object) -> tuple[int, ...]:
    """Return the non-zero sequence lengths of ``cu_seqlens``, ``[sequences + 1]``."""
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(
            f"{operator}: cu_seqlens is a tensor, [sequences + 1] int32; got {type(cu_seqlens).__name__}"
        )
    require(
        cu_seqlens.dtype in (torch.int32, torch.int64) and cu_seqlens.dim() == 1 and cu_seqlens.numel() > 0,
        operator,
        lambda: f"cu_seqlens must be [sequences + 1] int32, got {list(cu_seqlens.shape)} {cu_seqlens.dtype}",
    )
    bounds = cu_seqlens.tolist()
    require(bounds[0] == 0, operator, lambda: f"cu_seqlens begins with 0, got {bounds[0]}")
    lengths = tuple(end - begin for begin, end in pairwise(bounds))
    # Index of the first bound that is below the bound before it, or 0.
    falls = next((end for end, length in enumerate(lengths, 1) if length < 0), 0)
    require(
        not falls,
        operator,
        lambda: (
            f"cu_seqlens must not descend, and entry {falls}, {bounds[falls]}, is below the one before it"
        ),
    )
    return tuple(length for length in lengths if length)


def _fill(lengths: tuple[int, ...], batch: int, query_length: int) -> bool:
    """Return whether the sequences fill every batch row exactly, and no sequence spans two batch rows."""
    filled = 0
    for length in lengths:
        filled += length
        if filled > query_length:
            return False
        filled %= query_length
    return filled == 0 and sum(lengths) == batch * query_length


class Ranges(NamedTuple):
    """Visible keys of each query row: ``starts <= s < ends``."""

    starts: Tensor
    """``[batch, query_length]`` int32, at least 0."""
    ends: Tensor
    """``[batch, query_length]`` int32, at most the number of keys."""
    plain_causal: bool
    """True if the mask is known to be the causal default; if False, it may still be causal."""
    form: RowForm | None = None
    """Form of the ranges, where the host knows it."""


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
        operator: operator's name in an error.
        batch: number of sequences.
        query_length: rows per sequence.
        key_length: keys per sequence.
        starts: ``[query_length]`` or ``[batch, query_length]``, first visible key of each row, or None for 0.
        ends: one past the last visible key, with the shape of ``starts``, or None for causal rows.
        device: device of the result.
        form: host-side description of the ranges, used if neither ``starts`` nor ``ends`` is given.
            With debug checks on, ``starts`` and ``ends`` are read and compared with it.

    Returns:
        The ranges, clamped to ``0 <= starts`` and ``ends <= key_length``. A row with ``starts >= ends`` sees
        nothing.

    Raises:
        ValueError: shapes or dtypes do not fit, or the form does not match the rows.
    """
    if form is not None:
        form.check(operator, batch, query_length, key_length)
        # Forms that equal the default need no ranges: they stay marked as plainly causal.
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
        ends = torch.arange(1, query_length + 1, dtype=torch.int32, device=device)  # [query_length]
    if starts is None:
        starts = torch.zeros(query_length, dtype=torch.int32, device=device)  # [query_length]
    rows = []
    for name, bound in (("starts", starts), ("ends", ends)):
        require(
            bound.shape in ((query_length,), (batch, query_length)) and not bound.is_floating_point(),
            operator,
            f"{name} must be integers [{query_length}] or [{batch}, {query_length}], "
            f"got {bound.dtype} {list(bound.shape)}",
        )
        # Clamp before the conversion: int64 values beyond int32 would wrap to another position.
        bound = bound.to(device=device, dtype=torch.int64).clamp(0, key_length).to(torch.int32)
        rows.append(bound.expand(batch, query_length))  # [batch, query_length]
    if plain:
        form = TO_LAST_KEY
    # Comparing reads the device, so it is a debug check.
    elif form is not None and checks.enabled():
        said = form.ranges(batch, query_length, key_length, device)
        require(
            torch.equal(torch.stack(rows), said),
            operator,
            f"starts and ends are not those of the form that came with them, {form}",
        )
    return Ranges(rows[0], rows[1], plain, form)
