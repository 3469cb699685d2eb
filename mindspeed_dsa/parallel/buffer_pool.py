"""Memory that transfers write to, kept from one to the next.

New memory on a host costs a page fault for every page, in the thread that a transfer should leave alone.
Devices have allocators that keep memory themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST = 8
"""Buffers that are kept; sizes that a job no longer uses make room for those that it does."""
_buffers: list[Tensor] = []


def take(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Take contiguous memory with anything in it, which nobody else has.

    Args:
        like: says of what shape and on which device.
        dtype: default: that of ``like``.
    """
    dtype = like.dtype if dtype is None else dtype
    if like.device.type == "cpu":
        for number, buffer in enumerate(_buffers):
            if buffer.dtype == dtype and buffer.numel() == like.numel():
                return _buffers.pop(number).view(like.shape)
    return torch.empty(like.shape, dtype=dtype, device=like.device)


def give_back(*buffers: Tensor) -> None:
    """Let :func:`take` hand them out again: nothing reads them, writes to them or has saved them."""
    for buffer in buffers:
        # Those of inference mode cannot be written to outside of it, where the next training step is.
        if buffer.device.type == "cpu" and not buffer.is_inference():
            _buffers.insert(0, buffer)
    del _buffers[_MOST:]


def held() -> tuple[Tensor, ...]:
    """Return what :func:`take` could hand out."""
    return tuple(_buffers)
