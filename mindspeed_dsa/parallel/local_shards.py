"""Tensors of which each rank has a piece, for code that works element by element."""

from __future__ import annotations

from torch import Tensor


def local_of(tensor: Tensor) -> Tensor:
    """This rank's piece of a ``DTensor``, the same object at each call; any other tensor itself."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
