"""Neighbours put opposite each other, and back."""

from __future__ import annotations

import torch
from torch import Tensor


def to_halves(pairs: Tensor) -> Tensor:
    """``[..., (x0, y0, x1, y1, ...)]`` to ``[..., (x0, x1, ..., y0, y1, ...)]``."""
    return torch.cat((pairs[..., 0::2], pairs[..., 1::2]), -1)


def to_pairs(halves: Tensor) -> Tensor:
    """The inverse."""
    return torch.stack(halves.chunk(2, -1), -1).flatten(-2)
