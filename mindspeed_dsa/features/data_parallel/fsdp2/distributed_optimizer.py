"""The distributed optimizer's format ``fully_reshardable``, read and written by FSDP2's optimizers.

Moments have the same keys and shapes in it as elsewhere. Master weights have another key, and those of
float32 weights, which are the weights, are there as well. Steps are counted in parameter groups, where other
optimizers have one count beside the moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.patches.errors import SettingsError

_TYPE = "distrib_optim_sharding_type"
_FORMAT = "fully_reshardable"
_MASTERS = "fp32_from_fp16_params"
LOADED = "masters"
"""Where master weights are while they are loaded: DDP's rank 0 may have written that there are none."""
_COPIES = "weights"
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
            _check(format_)
        state = original(self, model_sharded_state_dict, is_loading, metadata=metadata)
        if not is_loading:
            _count_for_all(self.optimizer, state.get("optimizer", state))
        if format_ is not None:
            if _MASTERS in state:
                for master in (each for group in state[_MASTERS] for each in group):
                    master.key = master.key.replace(_KEY, _KEY_THERE, 1)
            else:
                state = {"optimizer": state}
                if not is_loading:  # they are the model's
                    state[_COPIES] = _copies(self, model_sharded_state_dict, context.megatron)
            state["param_state_sharding_type"] = format_
            _count_in_groups(self.optimizer, state["optimizer"])
        if _MASTERS in state:
            masters = state.pop(_MASTERS)
            # Rank 0 would write that there are none, and ranks that have some could not read theirs.
            own = context.megatron("core.dist_checkpointing.mapping").LocalNonpersistentObject
            state[LOADED if is_loading else _MASTERS] = masters if any(masters) else own(masters)
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


def _check(format_: str) -> None:
    """Refuse what cannot be read, before anything is."""
    if format_ != _FORMAT:
        raise SettingsError(
            f"fsdp2: this checkpoint has the distributed optimizer's state as {format_}, pieces of buffers "
            "that lie otherwise here; save it with --dist-ckpt-optim-fully-reshardable, or add "
            "--no-load-optim to load the weights alone"
        )


def _copies(optimizer: Any, model_sharded_state_dict: Any, megatron: Megatron) -> dict[int, Any]:
    """Where float32 weights lie as masters, by their numbers in the optimizer."""
    checkpoints = megatron("core.dist_checkpointing.optimizer")
    places = checkpoints.get_param_id_to_sharded_param_map(
        model_sharded_state_dict, optimizer.get_parameters()
    )
    return {index: replace(place, key=_KEY_THERE + place.key) for index, place in places.items()}


def _count_in_groups(optimizer: Any, state: dict[str, Any]) -> None:
    if _counts_beside_moments(optimizer):
        steps = float(state["state"].get("common_step", 0))
        for group in state["param_groups"]:
            group["step"] = steps


def count_in_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``ChainedOptimizer.load_state_dict``: rank 0 may have had no experts' steps to count.

    All optimizers of a chain have done the same number. Fused ones count in their groups, and without a count
    would begin anew.
    """

    def load_state_dict(self: Any, state_dict: Any) -> Any:
        parts = self.chained_optimizers
        states = [state_dict] if len(parts) == 1 else [state_dict[index] for index in range(len(parts))]
        inner = [each.get("optimizer", each) for each in states]
        found = [each.get("state", {}) for each in inner]
        count = next((each["common_step"] for each in found if "common_step" in each), None)
        for part, each in zip(parts, found, strict=True):
            if count is not None and _counts_beside_moments(part.optimizer):
                each.setdefault("common_step", count)
        groups = [group for each in inner for group in each.get("param_groups", ())]
        steps = next((group["step"] for group in groups if group.get("step") is not None), None)
        for group in groups if steps is not None else ():
            if group.get("step") is None:
                group["step"] = steps
        return original(self, state_dict)

    return load_state_dict


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
