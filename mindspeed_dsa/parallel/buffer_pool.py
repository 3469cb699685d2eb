"""Pool of receive buffers in host memory, reused across transfers.

Fresh host memory causes a page fault per page, which delays the thread that should compute during a transfer.
Device memory is not pooled, because its allocators already cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST = 8
"""Number of buffers kept. The oldest are dropped, so that sizes no longer in use disappear."""
_buffers: list[Tensor] = []


def take(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized contiguous buffer.

    Args:
        like: tensor with the buffer's shape and device.
        dtype: dtype of the buffer; default: ``like.dtype``.
    """
    dtype = like.dtype if dtype is None else dtype
    if like.device.type == "cpu":
        for number, buffer in enumerate(_buffers):
            if buffer.dtype == dtype and buffer.numel() == like.numel():
                return _buffers.pop(number).view(like.shape)
    return torch.empty(like.shape, dtype=dtype, device=like.device)


def give_back(*buffers: Tensor) -> None:
    """Return buffers to the pool. The caller guarantees that nothing reads, writes or saves them any more."""
    for buffer in buffers:
        # Inference tensors cannot be written in a later training step, so they are not kept.
        if buffer.device.type == "cpu" and not buffer.is_inference():
            _buffers.insert(0, buffer)
    del _buffers[_MOST:]


def held() -> tuple[Tensor, ...]:
    """Return the pooled buffers."""
    return tuple(_buffers)
