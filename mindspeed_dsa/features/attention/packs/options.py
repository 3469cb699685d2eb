"""What packing reads from the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_dsa.megatron import dsa as dsa

if TYPE_CHECKING:
    from typing_extensions import Self

_BLOCK_ROWS = 128


@dataclass(frozen=True)
class Options:
    """How packs are dealt out.

    Attributes:
        block_rows: rows of the blocks that context parallel ranks get.
        fused: the parts of DSA that run on our operators.
    """

    block_rows: int
    fused: dsa.Options

    @classmethod
    def of(cls, settings: Any) -> Self:
        """From resolved settings."""
        return cls(getattr(settings, "cp_block_rows", None) or _BLOCK_ROWS, dsa.Options.of(settings))
