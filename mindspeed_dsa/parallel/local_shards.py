"""Tensors of which each rank has a piece, for code that works element by element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a ``DTensor``, the same object at each call; any other tensor itself.

    Raises:
        AttributeError: this torch keeps the piece elsewhere; the ``DTensor`` is no piece of itself.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    try:
        return tensor._local_tensor
    except AttributeError as error:
        raise AttributeError(
            f"mindspeed_dsa: a DTensor of torch {torch.__version__} has no _local_tensor, the rank's own "
            "piece of a sharded weight; use a torch release that docs/compatibility.md lists as tried"
        ) from error


def like(value: Any, sharded: Any) -> Any:
    """Return ``value`` as a shard like ``sharded``, if it is a plain tensor of the shard's size."""
    if not isinstance(sharded, DTensor) or isinstance(value, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != local_of(sharded).shape:
        return value
    return DTensor.from_local(
        value.detach(),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
