"""State dicts and checkpoints of stacked experts, in the names and shapes that ``SequentialMLP`` gives them.

A whole state dict is translated when it is made and when it is loaded. In a distributed checkpoint each stack
is a factory of the shards that its experts would have; Megatron passes optimizer state through the same
factory, so moments can be exchanged as weights can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.moe.grouped_experts.feature import SLICES
from mindspeed_dsa.features.moe.grouped_experts.stacks import stack_of


def expert_keys(experts: Any, prefix: str, name: str) -> list[str]:
    """Of the weights of layer ``name`` of each local expert."""
    return [f"{prefix}local_experts.{index}.{name}.weight" for index in range(experts.num_local_experts)]


def translate_names(experts: Any) -> None:
    """From now on state dicts of grouped experts are those of ``SequentialMLP``, and may be loaded."""
    experts._register_state_dict_hook(_to_experts)
    experts.register_load_state_dict_pre_hook(_from_experts)


def _linears(experts: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(experts.mlp, name)) for name in ("linear_fc1", "linear_fc2")]


def _to_experts(experts: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, linear in _linears(experts):
        key = f"{prefix}mlp.{name}.weight"
        # Who keeps variables wants the parameters themselves: Megatron looks them up in its optimizers, and
        # puts what sharded_state_dict says in their place.
        if key in state_dict and not isinstance(state_dict[key], torch.nn.Parameter):
            stack = state_dict.pop(key)
            state_dict.update(zip(expert_keys(experts, prefix, name), linear.by_expert(stack), strict=True))


def _from_experts(experts: Any, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    for name, linear in _linears(experts):
        keys = expert_keys(experts, prefix, name)
        if all(key in state_dict for key in keys):
            state_dict[f"{prefix}mlp.{name}.weight"] = linear.stack([state_dict.pop(key) for key in keys])
        for key in keys:
            # Megatron's layers put an empty one beside every weight.
            state_dict.pop(key.removesuffix("weight") + "_extra_state", None)


def sharded_stack(linear: Any, shards: Sequence[Any], megatron: Megatron) -> Any:
    """A factory of the shards of all local experts.

    Args:
        linear: has the stack.
        shards: what Megatron makes of each expert's weight: a ``ShardedTensor``, or for a gated layer a
            factory of two.
        megatron: whose.
    """
    mapping: Any = megatron("core.dist_checkpointing.mapping")
    first = shards[0]
    # Keys are equal, or differ in the expert's number. Their beginning is renamed by pipeline stages later,
    # and optimizer state has the name of its kind in front.
    letters = zip(*(shard.key for shard in shards), strict=False)
    common = sum(1 for _ in takewhile(lambda each: len(set(each)) == 1, letters))
    tails = [shard.key[common:] for shard in shards]

    def made(index: int, key: str, data: Tensor, **facts: Any) -> Any:
        key = key.removesuffix(tails[0]) + tails[index]
        if isinstance(shards[index], mapping.ShardedTensorFactory):
            return replace(shards[index], key=key, data=data, **facts).build()
        return replace(shards[index], key=key, data=data, dtype=data.dtype, **facts)

    def merged(index: int, loaded: Any) -> Tensor:
        shard = shards[index]
        whole: Tensor = shard.merge_fn(loaded) if isinstance(shard, mapping.ShardedTensorFactory) else loaded
        return whole

    @torch.no_grad()
    def build(key: str, stack: Tensor, replica_id: Any, flattened_range: slice | None) -> Any:
        if flattened_range is None:
            return [
                made(index, key, matrix.contiguous(), replica_id=replica_id)
                for index, matrix in enumerate(linear.by_expert(stack))
            ]
        if linear.layout != "nk":
            raise RuntimeError(
                "moe-grouped-gemm: optimizer state in flat pieces (fully_sharded_model_space) has the "
                "order of matrices [out, in]; add --gemm-weight-layout nk, or --no-save-optim and "
                "--no-load-optim"
            )
        return {
            str(index): made(index, key, piece, replica_id=replica_id, flattened_range=within)
            for index, piece, within in _flat_pieces(stack, flattened_range, linear.weight[0].numel())
        }

    @torch.no_grad()
    def merge(loaded: Any) -> Tensor:
        if isinstance(loaded, dict):
            return torch.cat([merged(int(index), piece) for index, piece in loaded.items()])
        whole: Tensor = linear.stack([merged(index, each) for index, each in enumerate(loaded)])
        return whole

    return mapping.ShardedTensorFactory(first.key, linear.weight, build, merge, first.replica_id)


def _flat_pieces(flat: Tensor, place: slice, size: int) -> Iterator[tuple[int, Tensor, slice]]:
    """What a flat part of a stack has of each expert's flat matrix.

    Args:
        flat: the part.
        place: where it lies in the flat stack.
        size: of one matrix.
    """
    for index in range(place.start // size, -(-place.stop // size)):
        start, stop = max(place.start, index * size), min(place.stop, (index + 1) * size)
        if start < stop:
            offset = index * size
            yield index, flat[start - place.start : stop - place.start], slice(start - offset, stop - offset)


def refuse_slices_of_buffers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate methods of ``DistributedOptimizer`` that save or load each rank's slices of its buffers."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = (parameter for buffer in self.buffers for parameter in buffer.param_index_map)
        if any(stack_of(parameter) for parameter in parameters):
            raise RuntimeError(f"moe-grouped-gemm: {SLICES}")
        return original(self, *args, **kwargs)

    return method
