"""Megatron's helpers for sharded tensors, without copies and for meshes with replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from mindspeed_dsa.features.data_parallel.fsdp2.shards import shard_axis
from mindspeed_dsa.parallel.local_shards import local_of


def to_local_if_dtensor(tensor: Any) -> Any:
    """Replaces the function of this name and ``_unshard_if_dtensor``: this rank's piece, one object."""
    return local_of(tensor)


def shard_group_if_dtensor(tensor: Any, data_parallel_group: Any = None) -> Any:
    """Replaces ``get_data_parallel_group_if_dtensor``: the ranks that have the other pieces.

    Args:
        tensor: a parameter or gradient.
        data_parallel_group: of the tensors before, which have the same; None if there is none.
    """
    if not isinstance(tensor, DTensor):
        return data_parallel_group
    return tensor.device_mesh.get_group(shard_axis(tensor))


def gradient_in_place(tensor_to_shard: Tensor, reference_tensor: Any) -> Any:
    """Replaces ``_reshard_if_dtensor``.

    Args:
        tensor_to_shard: what :func:`to_local_if_dtensor` made of the gradient, reduced since.
        reference_tensor: the gradient.
    """
    return reference_tensor


def describe_whole_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``_collect_main_grad_data_for_unscaling``: one operator works on all of them.

    Pieces come first: by the first one torch decides whether ranks tell each other of infinities.
    """

    def collect(self: Any) -> Any:
        gradients = original(self) or []
        pieces = [each for each in gradients if isinstance(each, DTensor)]
        if len(pieces) in (0, len(gradients)):
            return gradients
        mesh = pieces[0].device_mesh
        everywhere = [Replicate()] * mesh.ndim
        return pieces + [
            DTensor.from_local(each, mesh, everywhere, run_check=False)
            for each in gradients
            if not isinstance(each, DTensor)
        ]

    return collect
