"""Local shards of parameters: of a ``DTensor`` for elementwise code, and in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

_DIMENSIONS = "dimensions_to_cut"


@dataclass(frozen=True)
class Cut:
    """Position of a shard within its parameter.

    Attributes:
        dim: sharded dimension.
        index, pieces: index of this rank's shard, and the number of equal shards.
        replica: index of this copy among the replicas of the shard.
    """

    dim: int
    index: int
    pieces: int
    replica: int


def cut_of(tensor: DTensor) -> Cut:
    """Return the position of a DTensor's shard; it must be sharded along one mesh dimension."""
    mesh = tensor.device_mesh
    axis = shard_axis(tensor)
    (dim,) = (placement.dim for placement in tensor.placements if isinstance(placement, Shard))
    # On a mesh with two dimensions (HSDP), the other one holds the copies.
    replica = 0 if mesh.ndim == 1 else mesh.get_local_rank(1 - axis)
    return Cut(dim, mesh.get_local_rank(axis), mesh.size(axis), replica)


def piece_of(whole: Any, cut: Cut) -> Any:
    """Build the ``ShardedTensor`` of a part of a tensor parallel rank's tensor.

    Args:
        whole: Megatron's ``ShardedTensor`` of the part, built as if the rank had no other part.
        cut: position of the part in the tensor parallel rank's tensor.
    """
    axis = cut.dim + whole.prepend_axis_num
    rows = whole.local_shape[cut.dim]

    def along(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:axis], value, *values[axis + 1 :])

    return replace(
        whole,
        global_shape=along(whole.global_shape, whole.global_shape[axis] * cut.pieces),
        global_offset=along(whole.global_offset, whole.global_offset[axis] * cut.pieces + cut.index * rows),
        axis_fragmentations=along(whole.axis_fragmentations, whole.axis_fragmentations[axis] * cut.pieces),
        replica_id=(*whole.replica_id[:-1], cut.replica),
    )


def shard_axis(tensor: DTensor) -> int:
    """Return the index of the mesh dimension along which the tensor is sharded."""
    return next(axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard))


def cut_on(parameter: Any, dims: Iterable[int]) -> None:
    """Declare the dimensions along which a parameter may be sharded, in order of preference."""
    setattr(parameter, _DIMENSIONS, tuple(dims))


def dimensions_to_cut(parameter: Any) -> tuple[int, ...] | None:
    """Return the dimensions declared with :func:`cut_on`; ``None``: any dimension is allowed."""
    return getattr(parameter, _DIMENSIONS, None)


def local_of(tensor: Tensor) -> Tensor:
    """Return a ``DTensor``'s local shard, always the same object. Return other tensors as they are.

    Raises:
        AttributeError: this torch release does not store the shard as ``_local_tensor``.
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
    """Wrap a plain tensor ``value`` as a DTensor like ``sharded``, if its shape is the local shard's."""
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
