"""Checkpoints in which every expert has its own number, and the formats that cannot say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.expert_placement.feature import Options
from mindspeed_dsa.megatron import moe_layers
from mindspeed_dsa.megatron.attribute_override import AttributeOverride
from mindspeed_dsa.patches.errors import MindSpeedDSAError

_BY_PARAMETER = ("fully_reshardable", "fully_sharded_model_space")


class _Numbers(NamedTuple):
    """An expert parallel group of ranks with one expert each."""

    number: int
    experts: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.experts


def _one_expert(experts: Any, position: int, number: int) -> AttributeOverride:
    """One expert of a ``SequentialMLP``, on a rank whose number among all is the expert's.

    Megatron numbers experts by rank and position; with one expert per rank that leaves the rank.
    """
    group = _Numbers(number, experts.ep_group.size() * experts.num_local_experts)
    held = [experts.local_experts[position]]
    return AttributeOverride(experts, local_experts=held, num_local_experts=1, ep_group=group)


def number_experts(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``SequentialMLP.sharded_state_dict``."""

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> Any:
        if not moe_layers.is_placed(self):
            return original(self, prefix, sharded_offsets, metadata)
        found = {}
        for position, number in enumerate(moe_layers.experts_of(self, self.ep_group.rank())):
            one = original(_one_expert(self, position, number), prefix, sharded_offsets, metadata)
            first, own = f"{prefix}local_experts.0.", f"{prefix}local_experts.{position}."
            found.update({own + name.removeprefix(first): value for name, value in one.items()})
        return found

    return sharded_state_dict


def refuse_buckets(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``DistributedOptimizer.sharded_state_dict``: only formats by parameter follow the experts."""

    def sharded_state_dict(
        self: Any,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: Any = None,
        **kwargs: Any,
    ) -> Any:
        kind = sharding_type or (metadata or {}).get("distrib_optim_sharding_type", _BY_PARAMETER[1])
        if kind not in _BY_PARAMETER:
            how = "is not loaded" if is_loading else "is not saved"
            raise MindSpeedDSAError(
                f"mindspeed_dsa: {context.feature}: the distributed optimizer's state {how} as {kind}: that "
                "format goes by places in a rank's buffers, not by experts, and another placement would give "
                "it to other experts; save with --dist-ckpt-optim-fully-reshardable, and load a checkpoint "
                "in this format with --no-load-optim or without --moe-expert-placement"
            )
        return original(self, model_sharded_state_dict, is_loading, sharding_type, metadata, **kwargs)

    return sharded_state_dict


def refuse_files_of_ranks(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``_load_base_checkpoint``: whatever the arguments say, it reads the format that it finds."""

    def _load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        kind = getattr(result[-1], "name", None)
        if kind not in (None, "GLOBAL"):
            raise MindSpeedDSAError(
                f"mindspeed_dsa: {context.feature}: checkpoint {result[1]} is of the kind {kind.lower()}, "
                "which knows experts by their place on a rank; convert it to torch_dist without "
                "--moe-expert-placement first"
            )
        return result

    return _load_base_checkpoint
