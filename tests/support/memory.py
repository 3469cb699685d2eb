"""Memory whose allocation and release a process's figures must show."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def fresh_memory(nbytes: int) -> Tensor:
    """Return newly mapped and written pages, because the allocator may reuse freed ones.

    They are unmapped when the tensor is deleted.
    """
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).fill_(1)
