"""Where the coordinates of a pair are; neighbours put opposite each other, and back."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Layout = Literal["halves", "pairs", "pairs to halves"]
"""Where the two coordinates of a pair are.

``halves``: dimension ``i`` and ``i + width / 2``. ``pairs``: neighbours, ``2 i`` and ``2 i + 1``. ``pairs to
halves``: neighbours before the rotation and opposite after it, as DeepSeek's latent attention has it.
"""


def to_halves(pairs: Tensor) -> Tensor:
    """``[..., (x0, y0, x1, y1, ...)]`` to ``[..., (x0, x1, ..., y0, y1, ...)]``."""
    return torch.cat((pairs[..., 0::2], pairs[..., 1::2]), -1)


def to_pairs(halves: Tensor) -> Tensor:
    """The inverse."""
    return torch.stack(halves.chunk(2, -1), -1).flatten(-2)
