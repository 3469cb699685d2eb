"""Check of the head size for the Hadamard rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_head_dim(args: Any) -> Sequence[str]:
    """Report a head size that is not a power of two."""
    size = getattr(args, "dsa_indexer_head_dim", None)
    if size is None or (size > 0 and size & (size - 1) == 0):
        return ()
    return (f"--dsa-indexer-head-dim {size}: the Hadamard rotation needs a power of two; use 64 or 128",)
