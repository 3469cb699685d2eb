"""FSDP2 checkpoints with the same keys and shapes as without FSDP2.

FSDP2's optimizers can also read and write ``fully_reshardable``, a format of the distributed optimizer. It
differs from FSDP2's own format in three points:

* The keys of master weights begin with ``optimizer.state.param.``.
* Float32 weights, which are their own master weights, are saved a second time with a key of this form.
* The step count is stored in the param groups instead of the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.optimizers.moments import is_torch_adam
from mindspeed_dsa.parallel.local_shards import Cut, cut_of, like, local_of, piece_of
from mindspeed_dsa.patches.errors import SettingsError

_CUT = "_mindspeed_dsa_cut"
_WHOLE = "_mindspeed_dsa_whole"


def place_shard(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate Megatron's functions that build ``ShardedTensor`` objects, to accept FSDP2's ``DTensor``."""

    def make(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return original(tensor, *args, **kwargs)
        # Describe the shard as if it were all of this tensor parallel rank's part, then cut that.
        whole = original(local_of(tensor), *args, **kwargs)
        cut = cut_of(tensor)
        placed = _marked(piece_of(whole, cut), cut)
        setattr(placed, _WHOLE, whole)
        return placed

    return make


def place_gated_shard(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``apply_swiglu_sharded_factory`` to split shards of stacked gate and up projections."""
    # Each tensor parallel rank stacks [gate, up], but a checkpoint has all gates before all ups.
    # With 2 ranks: [g0, u0], [g1, u1] -> g0, g1, u0, u1.

    def apply(original_sh_ten: Any, sharded_offsets: Any, *args: Any, **kwargs: Any) -> Any:
        cut: Cut | None = getattr(original_sh_ten, _CUT, None)
        if cut is None:
            return original(original_sh_ten, sharded_offsets, *args, **kwargs)
        if cut.dim == 0:
            return _gate_or_up(original_sh_ten, cut)
        factory = original(getattr(original_sh_ten, _WHOLE), sharded_offsets, *args, **kwargs)
        build = factory.build_fn

        def build_shards(*args: Any) -> Any:
            return [piece_of(part, cut) for part in build(*args)]

        return _marked(replace(factory, build_fn=build_shards), cut)

    return apply


def _marked(placed: Any, cut: Cut) -> Any:
    setattr(placed, _CUT, cut)
    return placed


def _gate_or_up(placed: Any, cut: Cut) -> Any:
    """Build the ``ShardedTensor`` of a shard that has only gate rows or only up rows (even shard count)."""
    axis, rows, half = placed.prepend_axis_num, placed.local_shape[0], cut.pieces // 2
    # Pieces 0 to half - 1 of a tensor parallel rank are gate, the others are up.
    tensor_rank = placed.global_offset[axis] // rows // cut.pieces
    is_up, piece = divmod(cut.index, half)
    position = is_up * (placed.axis_fragmentations[axis] // 2) + tensor_rank * half + piece
    offset = placed.global_offset
    return _marked(replace(placed, global_offset=(*offset[:axis], position * rows, *offset[axis + 1 :])), cut)


def place_expert_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``SequentialMLP.sharded_state_dict`` to set ``replica_id`` of sharded experts."""
    # Megatron treats expert data parallel ranks as replicas of the whole expert.

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(self, *args, **kwargs)
        for placed in state.values():
            cut: Cut | None = getattr(placed, _CUT, None)
            if cut is not None:
                placed.replica_id = (*placed.replica_id[:-1], cut.replica)
        return state

    return sharded_state_dict


def load_everything(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``load_checkpoint`` to load model and optimizer, which Megatron skips for FSDP2."""

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("skip_load_to_model_and_opt", None)
        return original(*args, **kwargs)

    return load_checkpoint


def load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the wrapper's ``load_state_dict``, a no-op in Megatron, to load the model's shards."""

    def load_state_dict(self: Any, state_dict: Any, strict: bool = True) -> Any:
        parameters = self.module.state_dict(keep_vars=True)
        shards = {name: like(value, parameters.get(name)) for name, value in state_dict.items()}
        return self.module.load_state_dict(shards, strict=strict)

    return load_state_dict


def load_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``load_state_dict`` of optimizers to wrap loaded local shards as ``DTensor`` objects."""

    def load_state_dict(self: Any, state_dict: Any) -> Any:
        inner = with_common_step(self.optimizer, state_dict.get("optimizer", state_dict))
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state = {}
        for key, values in inner["state"].items():
            if isinstance(key, int):
                # Relocated moments are plain tensors, so the state there has priority over the parameter.
                there = self.optimizer.state.get(parameters[key], {})
                values = {
                    name: like(value, there.get(name, parameters[key])) for name, value in values.items()
                }
            state[key] = values
        mains = "fp32_from_fp16_params"
        if LOADED in state_dict:
            state_dict = {**state_dict, mains: state_dict[LOADED]}
        shards = {**inner, "state": state}
        if hasattr(self, "fp32_from_float16_groups"):
            shards = {**state_dict, "optimizer": shards}
        if mains in shards:
            shards[mains] = [
                [like(saved, main) for saved, main in zip(*groups, strict=True)]
                for groups in zip(shards[mains], self.fp32_from_float16_groups, strict=True)
            ]
        return original(self, shards)

    return load_state_dict


# -- the distributed optimizer's format -------------------------------------------------------------

_TYPE = "distrib_optim_sharding_type"
_FORMAT = "fully_reshardable"
_MASTERS = "fp32_from_fp16_params"
LOADED = "masters"
"""Key of master weights while loading, because rank 0 of stock DDP may have saved that there are none."""
_COPIES = "weights"
_KEY, _KEY_THERE = "optimizer.state.fp32_param.", "optimizer.state.param."


def say_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``_build_sharded_state_dict_metadata`` to set the optimizer format of the checkpoint."""

    def _build_sharded_state_dict_metadata(args: Any, *rest: Any, **kwargs: Any) -> Any:
        metadata = original(args, *rest, **kwargs)
        if getattr(args, "use_torch_fsdp2", False) and getattr(
            args, "dist_ckpt_optim_fully_reshardable", False
        ):
            metadata[_TYPE] = _FORMAT
        return metadata

    return _build_sharded_state_dict_metadata


def in_its_format(original: Callable[..., Any], context: Context[Any]) -> Callable[..., Any]:
    """Decorate ``sharded_state_dict`` of FSDP2's optimizers to support the format ``fully_reshardable``."""

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
                for master in (main for group in state[_MASTERS] for main in group):
                    master.key = master.key.replace(_KEY, _KEY_THERE, 1)
            else:
                state = {"optimizer": state}
                if not is_loading:  # float32 masters are the model's weights, which load with the model
                    state[_COPIES] = _copies(self, model_sharded_state_dict, context.megatron)
            state["param_state_sharding_type"] = format_
            _count_in_groups(self.optimizer, state["optimizer"])
        if _MASTERS in state:
            masters = state.pop(_MASTERS)
            # Rank 0 would save that there are none, and ranks with master weights could not read theirs.
            not_saved = context.megatron("core.dist_checkpointing.mapping").LocalNonpersistentObject
            state[LOADED if is_loading else _MASTERS] = masters if any(masters) else not_saved(masters)
        return state

    return sharded_state_dict


def _count_for_all(optimizer: Any, state: dict[str, Any]) -> None:
    """Copy the step count to all ranks: rank 0 saves it, but may have no experts and so no step count."""
    if not is_torch_adam(optimizer):
        return
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, state["state"].get("common_step"))
    count = next((each for each in counts if each is not None), None)
    if count is not None:
        state["state"].setdefault("common_step", count)


def _check(format_: str) -> None:
    """Raise for an optimizer format that cannot be read."""
    if format_ != _FORMAT:
        raise SettingsError(
            f"fsdp2: this checkpoint has the distributed optimizer's state as {format_}, pieces of buffers "
            "that lie otherwise here; save it with --dist-ckpt-optim-fully-reshardable, or add "
            "--no-load-optim to load the weights alone"
        )


def _copies(optimizer: Any, model_sharded_state_dict: Any, megatron: Megatron) -> dict[int, Any]:
    """Return a dict from parameter index to the weight's ``ShardedTensor``, with a master weight's key."""
    checkpoints = megatron("core.dist_checkpointing.optimizer")
    places = checkpoints.get_param_id_to_sharded_param_map(
        model_sharded_state_dict, optimizer.get_parameters()
    )
    return {index: replace(place, key=_KEY_THERE + place.key) for index, place in places.items()}


def _count_in_groups(optimizer: Any, state: dict[str, Any]) -> None:
    if is_torch_adam(optimizer):
        steps = float(state["state"].get("common_step", 0))
        for group in state["param_groups"]:
            group["step"] = steps


def count_in_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``ChainedOptimizer.load_state_dict`` to copy a step count to optimizers saved without one."""
    # Rank 0 may have had no experts, and so saved no count for their optimizer. Optimizers of a chain make
    # the same number of steps. Fused ones count in param groups, and would restart at 0 without a count.

    def load_state_dict(self: Any, state_dict: Any) -> Any:
        parts = self.chained_optimizers
        states = [state_dict] if len(parts) == 1 else [state_dict[index] for index in range(len(parts))]
        inner = [saved.get("optimizer", saved) for saved in states]
        entries = [saved.get("state", {}) for saved in inner]
        count = next((entry["common_step"] for entry in entries if "common_step" in entry), None)
        for part, entry in zip(parts, entries, strict=True):
            if count is not None and is_torch_adam(part.optimizer):
                entry.setdefault("common_step", count)
        groups = [group for saved in inner for group in saved.get("param_groups", ())]
        steps = next((group["step"] for group in groups if group.get("step") is not None), None)
        for group in groups if steps is not None else ():
            if group.get("step") is None:
                group["step"] = steps
        return original(self, state_dict)

    return load_state_dict


def with_common_step(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Move the step count of a loaded optimizer state from the param groups to Megatron's ``common_step``.

    Args:
        optimizer: torch's optimizer.
        state: dict with ``state`` and ``param_groups``.
    """
    if not is_torch_adam(optimizer):
        return state
    groups = [dict(group) for group in state["param_groups"]]
    steps = [group.pop("step") for group in groups if "step" in group]
    entries = state["state"]
    if steps and "common_step" not in entries:
        entries = {**entries, "common_step": torch.tensor(float(steps[0]))}
    return {**state, "state": entries, "param_groups": groups}
