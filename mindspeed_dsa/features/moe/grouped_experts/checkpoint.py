"""State dicts and checkpoints of stacked experts, in the names and shapes that ``SequentialMLP`` gives them.

A whole state dict is translated when it is made and when it is loaded. In a distributed checkpoint each stack
is a factory of the shards that its experts would have; Megatron passes optimizer state through the same
factory, so moments can be exchanged as weights can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.context import Megatron


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
        stack = state_dict.pop(f"{prefix}mlp.{name}.weight", None)
        if stack is not None:
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

    @torch.no_grad()
    def build(key: str, stack: Tensor, replica_id: Any, flattened_range: slice | None) -> list[Any]:
        if flattened_range is not None:
            raise RuntimeError(
                "moe-grouped-gemm: this format of optimizer state cuts parameters into flat pieces, which "
                "are not those of single experts; save and load without optimizer state (--no-save-optim, "
                "--no-load-optim), or train without --use-distributed-optimizer"
            )
        # Optimizer state gets the name of its kind in front.
        kind = key.removesuffix(first.key)
        built = []
        for shard, matrix in zip(shards, linear.by_expert(stack), strict=True):
            matrix = matrix.contiguous()
            facts = {"key": f"{kind}{shard.key}", "data": matrix, "replica_id": replica_id}
            if isinstance(shard, mapping.ShardedTensorFactory):
                built.append(replace(shard, **facts).build())
            else:
                built.append(replace(shard, dtype=matrix.dtype, **facts))
        return built

    @torch.no_grad()
    def merge(loaded: Sequence[Any]) -> Tensor:
        whole = [
            shard.merge_fn(part) if isinstance(shard, mapping.ShardedTensorFactory) else part
            for shard, part in zip(shards, loaded, strict=True)
        ]
        result: Tensor = linear.stack(whole)
        return result

    return mapping.ShardedTensorFactory(first.key, linear.weight, build, merge, first.replica_id)
