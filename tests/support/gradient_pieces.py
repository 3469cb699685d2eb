"""Gradients of a whole model, in pieces spread over ranks."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.parallel.local_shards import local_of


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that is spread over ranks.

    Attributes:
        name: whole tensor's name.
        shape: whole tensor's shape.
        place: index or slice of the part in each dimension of the whole tensor.
        data: the part.
    """

    name: str
    shape: tuple[int, ...]
    place: tuple[int | slice, ...]
    data: Tensor


def pieces_of_gradients(args: argparse.Namespace, model: Sequence[Any]) -> list[Piece]:
    """Return this rank's pieces, at the places of the weights' pieces in Megatron's checkpoints."""
    from dsa_job import checkpoint
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

    for chunk in model:
        _gather_gradient_shards(chunk)
    pieces = []
    with _gradients_as_parameters(model):
        state = checkpoint._model_state(list(model), checkpoint._metadata(args))
        apply_factories(state)
        for part in nested_values(state):
            if isinstance(part, ShardedTensor) and is_main_replica(part.replica_id):
                place = part.global_slice()
                pieces.append(Piece(part.key, part.global_shape, place, part.data.detach().clone()))
    return pieces


def put_together(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """Assemble tensors from the pieces of all ranks.

    Raises:
        AssertionError: an element of a tensor is in no piece, or in several.
    """
    tensors: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for piece in pieces:
        if piece.name not in tensors:
            tensors[piece.name] = torch.empty(piece.shape, dtype=piece.data.dtype)
            times[piece.name] = torch.zeros(piece.shape, dtype=torch.uint8)
        assert tensors[piece.name].shape == piece.shape, piece.name
        tensors[piece.name][piece.place] = piece.data
        times[piece.name][piece.place] += 1
    for name, each in times.items():
        assert bool((each == 1).all()), f"{name} is not put together of pieces that are there once"
    return tensors


def _gather_gradient_shards(chunk: Any) -> None:
    """Exchange reduced gradients: with the distributed optimizer each rank has one shard of them."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            shard = bucket.grad_data.view(ranks.size(), -1)[ranks.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=ranks)


@contextlib.contextmanager
def _gradients_as_parameters(model: Sequence[Any]) -> Iterator[None]:
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    tensors = [local_of(parameter) for parameter in parameters]
    weights = [tensor.data for tensor in tensors]
    try:
        for parameter, tensor in zip(parameters, tensors, strict=True):
            tensor.data = gradient_of(parameter).to(tensor.dtype)
        yield
    finally:
        for tensor, weight in zip(tensors, weights, strict=True):
            tensor.data = weight


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the gradient that the optimizer will use, or this rank's piece of it."""
    gradient = getattr(parameter, "main_grad", parameter.grad)
    return torch.zeros_like(local_of(parameter)) if gradient is None else local_of(gradient)
