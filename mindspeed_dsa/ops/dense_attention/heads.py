"""What kernels want of heads: as many for keys as for queries, and one head size for all three."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def repeated(states: Tensor, heads: int) -> Tensor:
    """``[batch, length, kv_heads, dim]`` to ``[batch, length, heads, dim]``; each head's copies in a row."""
    return states if states.shape[2] == heads else states.repeat_interleave(heads // states.shape[2], dim=2)


def summed(gradient: Tensor, kv_heads: int) -> Tensor:
    """The gradient of what :func:`repeated` was given, added up in fp32 or wider."""
    if gradient.shape[2] == kv_heads:
        return gradient
    wide = gradient if gradient.element_size() >= 4 else gradient.float()
    return wide.unflatten(2, (kv_heads, -1)).sum(dim=3)


def padded(size: int, *states: Tensor) -> tuple[Tensor, ...]:
    """The same with zeros behind, in heads of ``size``; they change neither a score nor an output."""
    return tuple(one if one.shape[-1] == size else F.pad(one, (0, size - one.shape[-1])) for one in states)
