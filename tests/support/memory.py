"""Memory whose coming and going a process's figures must show."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def fresh_memory(nbytes: int) -> Tensor:
    """Pages of their own, written to: the allocator may hold freed ones that it would hand out instead.

    They are unmapped when the tensor is deleted.
    """
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).fill_(1)
