"""Padding at the end of each sequence, to a length that the ranks divide.

Padding follows the data, so under the causal mask data never attends to it. Its length is the same in every
microbatch. Each rank can therefore compute the positions of its padding from the layout, also during
recomputation.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.patches import versions

if TYPE_CHECKING:
    from typing_extensions import Self

_RELEASES = SpecifierSet(">=0.16", prereleases=True)
"""Releases with routers that can exclude tokens from their losses and counts."""


@dataclass(frozen=True)
class Padding:
    """Length of a job's sequences before and after padding.

    Attributes:
        tokens: number of data tokens in each sequence or pack of documents; 0 if unknown.
        length: number of tokens including padding.
        ranks: context parallel size.
        block_rows: number of tokens per block of the layout; 0: two chunks per rank.
        is_pack: whether sequences are packed documents with a cost-balanced layout. The last rank then has
            all padding.
    """

    tokens: int = 0
    length: int = 0
    ranks: int = 1
    block_rows: int = 0
    is_pack: bool = False

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Build from settings or job arguments; without padding for old Megatron-core releases."""
        tokens = getattr(settings, "seq_length", None) or 0
        ranks = getattr(settings, "context_parallel_size", None) or 1
        tensor = getattr(settings, "tensor_model_parallel_size", None) or 1
        parts = tensor if getattr(settings, "sequence_parallel", False) else 1
        is_pack = bool(getattr(settings, "pack_documents", False))
        block_rows = 0 if is_pack else getattr(settings, "cp_block_rows", None) or 0
        length = padded_length(tokens, ranks, parts, block_rows)
        if length > tokens:
            release = versions.of_job(settings)
            if release is None or release not in _RELEASES:
                length = tokens
        return cls(tokens, length, ranks, block_rows, is_pack)

    @property
    def rows(self) -> int:
        """Number of padding tokens per sequence."""
        return self.length - self.tokens


def padded_length(tokens: int, ranks: int, parts: int, block_rows: int = 0) -> int:
    """Return the smallest length of at least ``tokens`` that can be divided evenly.

    Args:
        tokens: number of tokens in a sequence.
        ranks: context parallel size; each rank has two chunks, or two blocks at a time.
        parts: number of tensor parallel ranks that split a context parallel rank's tokens, or 1.
        block_rows: number of tokens per block; 0: two chunks per rank.
    """
    # 1000 tokens, 4 ranks, 2 parts: multiples of lcm(8, 8) = 8, so 1000. 1001 tokens: 1008.
    dealt = 2 * ranks * max(block_rows, 1) if ranks > 1 else 1
    unit = math.lcm(dealt, ranks * parts)
    return -(-tokens // unit) * unit
