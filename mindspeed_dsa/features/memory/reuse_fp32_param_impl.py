"""Where Megatron's two mixed precision optimizers meet the shared storages.

The order of events in a step: gradients are copied and checked (``prepare_grads``), clipped, and then
``step_with_ready_grads`` updates the master weights, makes the model's weights from them, and, with the
distributed optimizer, has them gathered. Master form lasts from the beginning of ``step_with_ready_grads``
to where the model's weights are made. A skipped step returns before, in pair form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed_dsa.features.memory.masters import Master, Masters
from mindspeed_dsa.features.memory.shared_storage import InPlaceStorage, OverBucketStorage, SharedStorage
from mindspeed_dsa.patches.errors import SettingsError

_Function = Callable[..., Any]
_ATTRIBUTE = "_mindspeed_dsa_masters"
_REFUSED = ("use_precision_aware_optimizer", "optimizer_cpu_offload")


def masters_of(optimizer: Any) -> Masters | None:
    """The shared master weights of one of Megatron's optimizers, if it was built with the feature on."""
    found: Masters | None = getattr(optimizer, _ATTRIBUTE, None)
    return found


def with_shared_storage(original: _Function) -> _Function:
    """Decorate ``Float16OptimizerWithFloat16Params.__init__``."""

    def __init__(self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        _refuse(config)
        original(self, optimizer, config, *args, **kwargs)
        if not self.is_stub_optimizer:
            setattr(self, _ATTRIBUTE, _share_parameters(self))

    return __init__


def with_shared_buckets(original: _Function) -> _Function:
    """Decorate ``DistributedOptimizer.__init__``."""

    def __init__(self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        _refuse(config)
        original(self, optimizer, config, *args, **kwargs)
        if self.ddp_config.use_megatron_fsdp:
            raise SettingsError(_not_with("use_megatron_fsdp"))
        if not self.is_stub_optimizer:
            setattr(self, _ATTRIBUTE, _share_buckets(self))

    return __init__


def with_master_weights(original: _Function) -> _Function:
    """Decorate ``MixedPrecisionOptimizer.step_with_ready_grads``."""

    @torch.no_grad()
    def step_with_ready_grads(self: Any) -> bool:
        masters = masters_of(self)
        if masters is None:
            return bool(original(self))
        with masters.stepping(self.optimizer):
            return bool(original(self))

    return step_with_ready_grads


def after_whole_steps(original: _Function) -> _Function:
    """Decorate ``MixedPrecisionOptimizer.prepare_grads``; a chain calls all before it updates any part."""

    def prepare_grads(self: Any) -> bool:
        masters = masters_of(self)
        if masters is not None:
            masters.whole.require()
        return bool(original(self))

    return prepare_grads


def by_rounding_in_place(original: _Function) -> _Function:
    """Decorate ``_copy_main_params_to_model_params``; float32 weights of a model are their own masters."""

    def _copy_main_params_to_model_params(self: Any) -> None:
        masters = masters_of(self)
        if masters is None:
            original(self)
        elif masters.in_master_form:
            masters.to_pairs()

    return _copy_main_params_to_model_params


def by_dropping_lower_halves(original: _Function) -> _Function:
    """Decorate ``_copy_model_params_to_main_params``."""

    @torch.no_grad()
    def _copy_model_params_to_main_params(self: Any, state_dict: Any = None) -> None:
        masters = masters_of(self)
        if masters is None:
            original(self, state_dict=state_dict)
        elif state_dict is None:
            masters.drop_lower_halves()
        else:
            with masters.opened():
                original(self, state_dict=state_dict)

    return _copy_model_params_to_main_params


def with_float32_copies(original: _Function) -> _Function:
    """Decorate ``Float16OptimizerWithFloat16Params.state_dict``."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        masters = masters_of(self)
        if masters is not None:
            masters.whole.require()
        result = original(self, *args, **kwargs)
        if masters is not None:
            groups = result["fp32_from_fp16_params"]
            result["fp32_from_fp16_params"] = [[masters.values(each) for each in group] for group in groups]
        return result

    return state_dict


def into_master_weights(original: _Function) -> _Function:
    """Decorate ``Float16OptimizerWithFloat16Params.load_state_dict``; nothing is allocated for it."""

    @torch.no_grad()
    def load_state_dict(self: Any, state_dict: Any) -> None:
        masters = masters_of(self)
        if masters is None:
            original(self, state_dict)
            return
        masters.to_master()
        try:
            original(self, state_dict)
        finally:
            masters.to_pairs()
        masters.whole.all_loaded()

    return load_state_dict


def with_float32_copy(original: _Function) -> _Function:
    """Decorate ``DistributedOptimizer._get_main_param_and_optimizer_states``."""

    def _get_main_param_and_optimizer_states(self: Any, model_param: Any) -> Any:
        masters = masters_of(self)
        if masters is not None:
            masters.whole.require()
        tensors = original(self, model_param)
        if masters is not None:
            tensors["param"] = masters.values(tensors["param"])
        return tensors

    return _get_main_param_and_optimizer_states


def into_shard(original: _Function) -> _Function:
    """Decorate ``DistributedOptimizer._set_main_param_and_optimizer_states``."""

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> None:
        masters = masters_of(self)
        if masters is None:
            original(self, model_param, tensors)
            return
        group, place = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][place]
        with masters.opened([main]):
            original(self, model_param, tensors)
        masters.whole.loaded(main)

    return _set_main_param_and_optimizer_states


def into_all_shards(original: _Function) -> _Function:
    """Decorate ``DistributedOptimizer.load_parameter_state_from_dp_zero_legacy``."""

    @torch.no_grad()
    def load_parameter_state_from_dp_zero_legacy(self: Any, state_dict: Any) -> None:
        masters = masters_of(self)
        if masters is None:
            original(self, state_dict)
            return
        with masters.opened():
            original(self, state_dict)
        masters.whole.all_loaded()

    return load_parameter_state_from_dp_zero_legacy


def _refuse(config: Any) -> None:
    """Programs without Megatron's arguments come past no other check."""
    if not config.bf16:
        raise SettingsError(
            "reuse-fp32-param: the optimizer's configuration does not say bf16=True; only bfloat16 weights "
            "share a storage with their master weights; set it, or switch the feature off"
        )
    for name in _REFUSED:
        if getattr(config, name, False):
            raise SettingsError(_not_with(name))


def _not_with(name: str) -> str:
    return (
        f"reuse-fp32-param: the optimizer is configured with {name}, which does not combine with shared "
        "storage of bfloat16 and float32 weights; switch one of them off"
    )


@torch.no_grad()
def _share_parameters(optimizer: Any) -> Masters:
    """Every bfloat16 parameter moves into a storage with its master weight, one after the other."""
    found = []
    groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
    for models, mains in groups:
        for model, main in zip(models, mains, strict=True):
            storage = InPlaceStorage(model.numel(), model.device)
            storage.weights.copy_(model.data.flatten())
            model.data = storage.weights.view(model.shape)
            found.append(Master(main, storage, 0))
            main.data = storage.master.view(model.shape)  # frees the separate master weight
    return Masters(found)


@torch.no_grad()
def _share_buckets(optimizer: Any) -> Masters:
    """The bucket stays where it is; on one data parallel rank, its buffer moves into a larger storage."""
    models = [model for group in optimizer.model_float16_groups for model in group]
    mains = [main for group in optimizer.shard_fp32_from_float16_groups for main in group]
    for main in mains:  # frees the separate master weights: they equal the bfloat16 weights so far
        main.data = torch.zeros((), dtype=main.dtype, device=main.device).expand(main.shape)
    storages: dict[tuple[int, int], SharedStorage] = {}
    for number, buffer in enumerate(optimizer.buffers):
        if buffer.param_dtype is not torch.bfloat16:
            continue
        rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
        if size == 1:
            whole = _move_buffer(optimizer, buffer)
        for place, bucket in enumerate(buffer.buckets):
            storages[number, place] = (
                whole if size == 1 else OverBucketStorage(bucket.param_data.view(-1), rank, size)
            )
    found = []
    for model, main in zip(models, mains, strict=True):
        number, _, place = optimizer.model_param_gbuf_map[model]
        storage = storages[number, place]
        which = "gbuf_world" if isinstance(storage, InPlaceStorage) else "gbuf_local"
        found.append(Master(main, storage, optimizer._get_model_param_range_map(model)[which].start))
    return Masters(found)


def _move_buffer(optimizer: Any, buffer: Any) -> InPlaceStorage:
    """Move a parameter buffer and everything that views it."""
    storage = InPlaceStorage(buffer.param_data.numel(), buffer.param_data.device)
    storage.weights.copy_(buffer.param_data.view(-1))
    buffer.param_data = storage.weights
    for bucket in buffer.buckets:
        bucket.param_data = storage.weights[bucket.offset : bucket.offset + bucket.param_data.numel()]
    for model, (start, end, _) in buffer.param_index_map.items():
        model.data = storage.weights[start:end].view(model.shape)
    for models, shards in zip(optimizer.model_float16_groups, optimizer.shard_float16_groups, strict=True):
        for place, model in enumerate(models):
            if model in buffer.param_index_map:
                span = optimizer._get_model_param_range_map(model)["param"]
                # Not by assigning to data: a view keeps the storage alive that it was made of.
                shard = model.detach().view(-1)[span.start : span.end]
                shard.__dict__.update(shards[place].__dict__)
                shards[place] = shard
    for chunk in optimizer.model_chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.cached_param_buffer_shard_list = [None] * len(group.buckets)
    return storage
