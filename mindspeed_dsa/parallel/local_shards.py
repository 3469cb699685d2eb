"""Tensors of which each rank has a piece, for code that works element by element."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

_DIMENSIONS = "dimensions_to_cut"


@dataclass(frozen=True)
class Cut:
    """Place of a shard in its parameter.

    Attributes:
        dim: the dimension that is cut.
        index, pieces: which of how many equal pieces this rank has.
        replica: which copy of that piece this is.
    """

    dim: int
    index: int
    pieces: int
    replica: int


def cut_of(tensor: DTensor) -> Cut:
    """Return the cut of a sharded parameter, or of anything of its placement."""
    mesh = tensor.device_mesh
    axis = shard_axis(tensor)
    (dim,) = (placement.dim for placement in tensor.placements if isinstance(placement, Shard))
    replica = 0 if mesh.ndim == 1 else mesh.get_local_rank(1 - axis)
    return Cut(dim, mesh.get_local_rank(axis), mesh.size(axis), replica)


def shard_axis(tensor: DTensor) -> int:
    """Return the dimension of the mesh whose ranks have different pieces."""
    return next(axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard))


def cut_on(parameter: Any, dims: Iterable[int]) -> None:
    """Say on which dimensions a parameter can be cut, best first, for whoever shards it."""
    setattr(parameter, _DIMENSIONS, tuple(dims))


def dimensions_to_cut(parameter: Any) -> tuple[int, ...] | None:
    """Return what :func:`cut_on` has said; None: nothing, which allows all."""
    return getattr(parameter, _DIMENSIONS, None)


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
            "piece of a sharded weight; use a torch release that docs/design/compatibility.md lists as tried"
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
