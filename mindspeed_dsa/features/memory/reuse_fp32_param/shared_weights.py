"""Megatron's two mixed precision optimizers on shared storages.

Master form lasts from the beginning of the step to where the model's weights are made. A skipped step never
gets there, and stays in pair form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.memory.reuse_fp32_param.feature import check_shared_weights
from mindspeed_dsa.features.memory.reuse_fp32_param.masters import Master, Masters
from mindspeed_dsa.features.memory.reuse_fp32_param.shared_storage import (
    InPlaceStorage,
    OverBucketStorage,
    SharedStorage,
)
from mindspeed_dsa.megatron import releases
from mindspeed_dsa.megatron.optimizer import OptimizerState, Place, is_sharded
from mindspeed_dsa.megatron.whole_steps import WholeSteps


class SharedWeights(OptimizerState):
    """The master weights of one optimizer, in storages that they share with the model's weights.

    Attributes:
        masters: the weights.
    """

    check = staticmethod(check_shared_weights)

    @classmethod
    def built(cls, optimizer: Any, context: Context[None]) -> SharedWeights:
        """Let the weights of a new optimizer share their storages."""
        share = _share_buckets if is_sharded(optimizer) else _share_parameters
        return cls(optimizer.optimizer, share(optimizer), WholeSteps(context.feature))

    def __init__(self, inner: Any, masters: list[Master], whole: WholeSteps) -> None:
        self.whole = whole
        self.masters = Masters(masters, whole)
        self._inner = inner

    @torch.no_grad()
    def step(self, call: Callable[[], bool]) -> bool:
        with self.masters.stepping(self._inner):
            return call()

    def master_to_model(self, call: Callable[[], None]) -> None:
        """Round in place; float32 weights of a model are their own masters."""
        if self.masters.in_master_form:
            self.masters.to_pairs()

    @torch.no_grad()
    def model_to_master(self, call: Callable[[], None], from_state_dict: bool) -> None:
        if not from_state_dict:
            self.masters.drop_lower_halves()
            return
        with self.masters.opened():
            call()

    def state_dict(self, call: Callable[[], Any]) -> Any:
        result = call()
        groups = result["fp32_from_fp16_params"]
        result["fp32_from_fp16_params"] = [[self.masters.values(each) for each in group] for group in groups]
        return result

    @torch.no_grad()
    def load_state_dict(self, call: Callable[[], Any]) -> Any:
        """Read into master form, which needs no other memory."""
        self.masters.to_master()
        try:
            return call()
        finally:
            self.masters.to_pairs()

    def get_parameter(self, place: Place, call: Callable[[], Any]) -> Any:
        tensors = call()
        tensors["param"] = self.masters.values(tensors["param"])
        return tensors

    @torch.no_grad()
    def set_parameter(self, place: Place, call: Callable[[], None]) -> None:
        with self.masters.opened([place.main]):
            call()

    @torch.no_grad()
    def load_parameters(self, call: Callable[[], None]) -> None:
        with self.masters.opened():
            call()


@torch.no_grad()
def _share_parameters(optimizer: Any) -> list[Master]:
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
    return found


@torch.no_grad()
def _share_buckets(optimizer: Any) -> list[Master]:
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
    return found


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
            releases.forget_shards(group)
    return storage
