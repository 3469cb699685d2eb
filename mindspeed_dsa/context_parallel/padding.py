"""Rows behind the data of each sequence, where ranks do not divide its length.

Padding follows the data, so that rows of causal attention never see it, and it is the same in every
microbatch: which of a rank's rows it takes follows from the layout alone, in a recomputation too.

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
"""Releases whose routers can leave tokens out of their losses and counts."""


@dataclass(frozen=True)
class Padding:
    """Length of a job's sequences, before and after padding.

    Attributes:
        tokens: rows of data in each sequence, or in each pack of documents; 0: unknown.
        length: rows with padding.
        ranks: context parallel size.
        block_rows: of blocks dealt to the ranks; 0: two chunks for each rank.
        is_pack: sequences are packs of documents, which are dealt out by work; the last rank has the padding.
    """

    tokens: int = 0
    length: int = 0
    ranks: int = 1
    block_rows: int = 0
    is_pack: bool = False

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Build from resolved settings or a job's arguments; older releases of Megatron-core pad nothing."""
        tokens = getattr(settings, "seq_length", None) or 0
        ranks = getattr(settings, "context_parallel_size", None) or 1
        tensor = getattr(settings, "tensor_model_parallel_size", None) or 1
        parts = tensor if getattr(settings, "sequence_parallel", False) else 1
        is_pack = bool(getattr(settings, "pack_documents", False))
        block_rows = 0 if is_pack else getattr(settings, "cp_block_rows", None) or 0
        length = padded_length(tokens, ranks, parts, block_rows)
        if length > tokens:
            release = versions.of_megatron(getattr(settings, "megatron_root", None) or "megatron")
            if release is None or release not in _RELEASES:
                length = tokens
        return cls(tokens, length, ranks, block_rows, is_pack)

    @property
    def rows(self) -> int:
        """Rows of padding in a sequence."""
        return self.length - self.tokens


def padded_length(tokens: int, ranks: int, parts: int, block_rows: int = 0) -> int:
    """Return the least length that can be dealt out evenly.

    Args:
        tokens: in a sequence.
        ranks: context parallel size; each rank has two chunks, or two blocks at a time.
        parts: tensor parallel ranks that split a context parallel rank's rows, or 1.
        block_rows: rows of a block; 0 for chunks.
    """
    dealt = 2 * ranks * max(block_rows, 1) if ranks > 1 else 1
    unit = math.lcm(dealt, ranks * parts)
    return -(-tokens // unit) * unit
