"""What a job's data loader is told where documents are packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_WANTED = {
    "reset_position_ids": True,
    "eod_mask_loss": True,
    # Every row's documents are known: a mask of sequence x sequence would say the same.
    "create_attention_mask_in_dataloader": False,
}


def reset_at_documents(args: Any) -> Sequence[str]:
    """Positions begin at 0 in each document, and no document predicts the first token of the next one."""
    changes = []
    for name, value in _WANTED.items():
        if hasattr(args, name) and getattr(args, name) != value:
            setattr(args, name, value)
            changes.append(f"--pack-documents: {name} is {value}")
    return changes
