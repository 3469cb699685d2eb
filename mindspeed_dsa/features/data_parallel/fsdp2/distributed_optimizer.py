"""The distributed optimizer's format ``fully_reshardable``, read and written by FSDP2's optimizers.

Moments have the same keys and shapes in it as elsewhere. Master weights have another key, and steps are
counted in parameter groups, where other optimizers have one count beside the moments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_dsa.context import Context
from mindspeed_dsa.patches.errors import SettingsError

_TYPE = "distrib_optim_sharding_type"
_FORMAT = "fully_reshardable"
_MASTERS = "fp32_from_fp16_params"
_KEY, _KEY_THERE = "optimizer.state.fp32_param.", "optimizer.state.param."


def say_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``_build_sharded_state_dict_metadata``: what a checkpoint says of its contents."""

    def _build_sharded_state_dict_metadata(args: Any, *rest: Any, **kwargs: Any) -> Any:
        metadata = original(args, *rest, **kwargs)
        if getattr(args, "use_torch_fsdp2", False) and getattr(
            args, "dist_ckpt_optim_fully_reshardable", False
        ):
            metadata[_TYPE] = _FORMAT
        return metadata

    return _build_sharded_state_dict_metadata


def in_its_format(original: Callable[..., Any], context: Context[Any]) -> Callable[..., Any]:
    """Decorate ``sharded_state_dict`` of the optimizers that FSDP2 works with."""

    def sharded_state_dict(
        self: Any,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        format_ = (metadata or {}).get(_TYPE)
        if format_ is not None:
            _check(self, format_)
        state = original(self, model_sharded_state_dict, is_loading, metadata=metadata)
        if not is_loading:
            _count_for_all(self.optimizer, state.get("optimizer", state))
        if format_ is not None:
            for master in (each for group in state[_MASTERS] for each in group):
                master.key = master.key.replace(_KEY, _KEY_THERE, 1)
            state["param_state_sharding_type"] = format_
            _count_in_groups(self.optimizer, state["optimizer"])
        if _MASTERS in state and not any(state[_MASTERS]):
            # Rank 0 would write that there are none, and ranks that have some could not read theirs.
            own = context.megatron("core.dist_checkpointing.mapping").LocalNonpersistentObject
            state[_MASTERS] = own(state[_MASTERS])
        return state

    return sharded_state_dict


def _count_for_all(optimizer: Any, state: dict[str, Any]) -> None:
    """Rank 0 alone writes the count, also where its stage has no experts and so none of them to count."""
    if not _counts_beside_moments(optimizer):
        return
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, state["state"].get("common_step"))
    count = next((each for each in counts if each is not None), None)
    if count is not None:
        state["state"].setdefault("common_step", count)


def _check(optimizer: Any, format_: str) -> None:
    """Refuse what cannot be read, before anything is."""
    remedy = "or add --no-load-optim to load the weights alone"
    if format_ != _FORMAT:
        raise SettingsError(
            f"fsdp2: this checkpoint has the distributed optimizer's state as {format_}, pieces of buffers "
            f"that lie otherwise here; save it with --dist-ckpt-optim-fully-reshardable, {remedy}"
        )
    if not hasattr(optimizer, "fp32_from_float16_groups"):
        raise SettingsError(
            f"fsdp2: the format {_FORMAT} has float32 weights a second time, as masters, of which there are "
            f"none here; omit --dist-ckpt-optim-fully-reshardable when it is saved, {remedy}"
        )


def _count_in_groups(optimizer: Any, state: dict[str, Any]) -> None:
    if _counts_beside_moments(optimizer):
        steps = float(state["state"].get("common_step", 0))
        for group in state["param_groups"]:
            group["step"] = steps


def with_common_step(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """State of torch's optimizer, as loaded, with the count of steps where Megatron looks for it.

    Args:
        optimizer: torch's.
        state: ``state`` and ``param_groups``.
    """
    if not _counts_beside_moments(optimizer):
        return state
    groups = [dict(group) for group in state["param_groups"]]
    steps = [group.pop("step") for group in groups if "step" in group]
    entries = state["state"]
    if steps and "common_step" not in entries:
        entries = {**entries, "common_step": torch.tensor(float(steps[0]))}
    return {**state, "state": entries, "param_groups": groups}


def _counts_beside_moments(optimizer: Any) -> bool:
    """Whether it is torch's own Adam; others count in their groups themselves."""
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
