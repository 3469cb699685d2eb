"""Documents packed into one row of tokens, as Megatron's ``PackedSeqParams`` describes them (THD)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pack:
    """Where documents lie in a row of tokens; rows of no document are padding.

    Attributes:
        documents: first row of each document, and one past its last, in order; none is empty.
        length: number of rows, padding included.
    """

    documents: tuple[tuple[int, int], ...]
    length: int

    @classmethod
    def of(cls, params: Any, length: int) -> Pack:
        """Read Megatron's description; waits for the device if its tensors are on one.

        Takes prefix sums of any shape, documents without tokens, rows behind the last document, and padding
        between documents (``cu_seqlens_q_padded``). Fields that are not about lengths are not read.

        Args:
            params: a ``PackedSeqParams`` of any release.
            length: rows of the whole pack, over all context parallel ranks.

        Raises:
            ValueError: it describes no documents of this many rows.
        """
        kind = getattr(params, "qkv_format", None)
        if kind != "thd":
            raise ValueError(
                f"packed sequences: qkv_format is {kind!r}; packs are one row of tokens, qkv_format='thd'"
            )
        ends = _prefix_sums(params, "cu_seqlens_q")
        if ends is None:
            raise ValueError("packed sequences: no cu_seqlens_q says where documents end; set it")
        keys = _prefix_sums(params, "cu_seqlens_kv")
        if keys is not None and keys != ends:
            raise ValueError(
                "packed sequences: cu_seqlens_q and cu_seqlens_kv differ; in self-attention queries and keys "
                "are those of the same documents"
            )
        begins = _prefix_sums(params, "cu_seqlens_q_padded") or ends
        sizes = [after - before for before, after in zip(ends[:-1], ends[1:], strict=True)]
        rooms = [after - before for before, after in zip(begins[:-1], begins[1:], strict=True)]
        fits = len(rooms) == len(sizes) and all(0 <= size <= room for size, room in zip(sizes, rooms))
        if ends[0] or begins[0] or not fits or begins[-1] > length:
            raise ValueError(
                f"packed sequences: {length} rows cannot hold documents that end at {ends}"
                + (f", in places that end at {begins}" if begins is not ends else "")
                + "; prefix sums begin with 0, never fall, and end with at most the number of rows"
            )
        return cls(tuple((at, at + size) for at, size in zip(begins, sizes) if size), length)

    @property
    def longest(self) -> int:
        """Length of the longest document."""
        return max((end - begin for begin, end in self.documents), default=0)

    @property
    def tokens(self) -> int:
        """Rows that belong to a document."""
        return sum(end - begin for begin, end in self.documents)

    @cached_property
    def starts(self) -> Tensor:
        """``[length]`` int32 on the host: first row of each row's document; 0 for padding."""
        return self._by_row[0]

    @cached_property
    def ends(self) -> Tensor:
        """``[length]`` int32 on the host: one past each row, up to which it sees its document; 0 for padding."""
        return self._by_row[1]

    @property
    def positions(self) -> Tensor:
        """``[length]`` int64 on the host: of each row in its document; 0 for padding."""
        return (self.ends - self.starts - 1).clamp_min(0).long()

    @property
    def counted(self) -> Tensor | None:
        """``[length]`` bool on the host, False for padding; None without any."""
        return None if self.tokens == self.length else self.ends > 0

    @cached_property
    def _by_row(self) -> tuple[Tensor, Tensor]:
        starts, ends = torch.zeros(2, self.length, dtype=torch.int32)
        bounds = torch.tensor(self.documents, dtype=torch.int64).view(-1, 2)
        sizes = bounds[:, 1] - bounds[:, 0]
        begins = bounds[:, 0].repeat_interleave(sizes)
        rows = torch.arange(self.tokens) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes) + begins
        starts[rows], ends[rows] = begins.int(), (rows + 1).int()
        return starts, ends


def _prefix_sums(params: Any, name: str) -> list[int] | None:
    sums = getattr(params, name, None)
    return None if sums is None else [int(end) for end in torch.as_tensor(sums).flatten().tolist()]
