"""Checkpoints with the keys and shapes that they have without FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import DTensor

from mindspeed_dsa.features.data_parallel.fsdp2.distributed_optimizer import LOADED, with_common_step
from mindspeed_dsa.features.data_parallel.fsdp2.shards import Cut, cut_of
from mindspeed_dsa.parallel.local_shards import like, local_of

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
        placed = _cut(whole, cut)
        setattr(placed, _CUT, cut)
        setattr(placed, _WHOLE, whole)
        return placed

    return make


def _cut(whole: Any, cut: Cut) -> Any:
    """One of ``cut.pieces`` pieces, where ``whole`` says the same of one that is not cut."""
    axis = cut.dim + whole.prepend_axis_num
    rows = whole.local_shape[cut.dim]

    def at(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:axis], value, *values[axis + 1 :])

    return replace(
        whole,
        global_shape=at(whole.global_shape, whole.global_shape[axis] * cut.pieces),
        global_offset=at(whole.global_offset, whole.global_offset[axis] * cut.pieces + cut.index * rows),
        axis_fragmentations=at(whole.axis_fragmentations, whole.axis_fragmentations[axis] * cut.pieces),
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

        return replace(factory, build_fn=build_shards)

    return apply


def _gate_or_up(placed: Any, cut: Cut) -> Any:
    """A piece of rows that all belong to one of the two; the number of pieces is even."""
    axis, rows, half = placed.prepend_axis_num, placed.local_shape[0], cut.pieces // 2
    tensor_rank = placed.global_offset[axis] // rows // cut.pieces
    is_up, piece = divmod(cut.index, half)
    at = is_up * (placed.axis_fragmentations[axis] // 2) + tensor_rank * half + piece
    offset = placed.global_offset
    return replace(placed, global_offset=(*offset[:axis], at * rows, *offset[axis + 1 :]))


def load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the wrapper's ``load_state_dict``, which would leave everything as it is."""

    def load_state_dict(self: Any, state_dict: Any, strict: bool = True) -> Any:
        own = self.module.state_dict(keep_vars=True)
        shards = {name: like(value, own.get(name)) for name, value in state_dict.items()}
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
        found = {**inner, "state": state}
        if hasattr(self, "fp32_from_float16_groups"):
            found = {**state_dict, "optimizer": found}
        if mains in found:
            found[mains] = [
                [like(saved, main) for saved, main in zip(*groups, strict=True)]
                for groups in zip(found[mains], self.fp32_from_float16_groups, strict=True)
            ]
        return original(self, found)

    return load_state_dict
