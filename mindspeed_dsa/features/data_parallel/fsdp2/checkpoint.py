"""Checkpoints with the keys and shapes that they have without FSDP2.

FSDP2's optimizers also read and write the distributed optimizer's format ``fully_reshardable``. Moments have
the same keys and shapes in it as elsewhere. Master weights have another key, and those of float32 weights,
which are the weights, are there as well. Steps are counted in parameter groups, where other optimizers have
one count beside the moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.parallel.local_shards import Cut, cut_of, like, local_of
from mindspeed_dsa.patches.errors import SettingsError

_CUT = "_mindspeed_dsa_cut"
_WHOLE = "_mindspeed_dsa_whole"


def place_shard(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate Megatron's functions that say where a tensor lies in a checkpoint."""

    def make(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return original(tensor, *args, **kwargs)
        # The piece taken for the whole of what this tensor parallel rank has.
        whole = original(local_of(tensor), *args, **kwargs)
        cut = cut_of(tensor)
        placed = _marked(_cut(whole, cut), cut)
        setattr(placed, _WHOLE, whole)
        return placed

    return make


def _cut(whole: Any, cut: Cut) -> Any:
    """Place one of ``cut.pieces`` pieces, where ``whole`` places what is not cut."""
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


def place_gated_shard(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``apply_swiglu_sharded_factory``, which splits stacked gate and up projections.

    Ranks of tensor parallelism have ``[gate, up]`` each, and a checkpoint has all gates before all ups.
    """

    def apply(original_sh_ten: Any, sharded_offsets: Any, *args: Any, **kwargs: Any) -> Any:
        cut: Cut | None = getattr(original_sh_ten, _CUT, None)
        if cut is None:
            return original(original_sh_ten, sharded_offsets, *args, **kwargs)
        if cut.dim == 0:
            return _gate_or_up(original_sh_ten, cut)
        factory = original(getattr(original_sh_ten, _WHOLE), sharded_offsets, *args, **kwargs)
        build = factory.build_fn

        def build_shards(*args: Any) -> Any:
            return [_cut(part, cut) for part in build(*args)]

        return _marked(replace(factory, build_fn=build_shards), cut)

    return apply


def _marked(placed: Any, cut: Cut) -> Any:
    setattr(placed, _CUT, cut)
    return placed


def _gate_or_up(placed: Any, cut: Cut) -> Any:
    """Place a piece of rows that all belong to one of the two; the number of pieces is even."""
    axis, rows, half = placed.prepend_axis_num, placed.local_shape[0], cut.pieces // 2
    tensor_rank = placed.global_offset[axis] // rows // cut.pieces
    is_up, piece = divmod(cut.index, half)
    position = is_up * (placed.axis_fragmentations[axis] // 2) + tensor_rank * half + piece
    offset = placed.global_offset
    return _marked(replace(placed, global_offset=(*offset[:axis], position * rows, *offset[axis + 1 :])), cut)


def place_expert_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``SequentialMLP.sharded_state_dict``, which takes expert data parallel ranks for replicas."""

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(self, *args, **kwargs)
        for each in state.values():
            cut: Cut | None = getattr(each, _CUT, None)
            if cut is not None:
                each.replica_id = (*each.replica_id[:-1], cut.replica)
        return state

    return sharded_state_dict


def load_everything(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``load_checkpoint``, which is told to pass over model and optimizer."""

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("skip_load_to_model_and_opt", None)
        return original(*args, **kwargs)

    return load_checkpoint


def load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the wrapper's ``load_state_dict``, which would leave everything as it is."""

    def load_state_dict(self: Any, state_dict: Any, strict: bool = True) -> Any:
        parameters = self.module.state_dict(keep_vars=True)
        shards = {name: like(value, parameters.get(name)) for name, value in state_dict.items()}
        return self.module.load_state_dict(shards, strict=strict)

    return load_state_dict


def load_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``load_state_dict`` of optimizers whose parameters may be shards."""

    def load_state_dict(self: Any, state_dict: Any) -> Any:
        inner = with_common_step(self.optimizer, state_dict.get("optimizer", state_dict))
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state = {}
        for key, values in inner["state"].items():
            if isinstance(key, int):
                # Moments that are kept elsewhere are plain tensors there.
                there = self.optimizer.state.get(parameters[key], {})
                values = {name: like(each, there.get(name, parameters[key])) for name, each in values.items()}
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
"""Key of master weights while they are loaded: DDP's rank 0 may have written that there are none."""
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
            not_saved = context.megatron("core.dist_checkpointing.mapping").LocalNonpersistentObject
            state[LOADED if is_loading else _MASTERS] = masters if any(masters) else not_saved(masters)
        return state

    return sharded_state_dict


def _count_for_all(optimizer: Any, state: dict[str, Any]) -> None:
    """Give every rank the count: rank 0 alone writes it, also where its stage has no experts to count."""
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
    """Return where float32 weights lie as masters, by their numbers in the optimizer."""
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
        entries = [each.get("state", {}) for each in inner]
        count = next((each["common_step"] for each in entries if "common_step" in each), None)
        for part, each in zip(parts, entries, strict=True):
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
    """Return state of torch's optimizer, as loaded, with the count of steps where Megatron looks for it.

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
    """Return whether it is torch's own Adam; others count in their groups themselves."""
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
