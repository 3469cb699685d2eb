"""Shared storage for model and master weights in Megatron's two mixed precision optimizers.

In pair form the float32 master tensors have no memory; their values are split into bfloat16 weights and lower
halves (``shared_storage.py``). The storages are in master form only from the start of an optimizer step until
Megatron writes the model's weights. A skipped step does not change the form.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.memory.optimizer_memory import FreedStorage
from mindspeed_dsa.features.memory.reuse_fp32_param.feature import check_shared_weights
from mindspeed_dsa.features.memory.reuse_fp32_param.shared_storage import (
    InPlaceStorage,
    OverBucketStorage,
    SharedStorage,
)
from mindspeed_dsa.megatron import releases
from mindspeed_dsa.megatron.optimizer import OptimizerState, Place, is_sharded
from mindspeed_dsa.optimizers.integrity import StepIntegrity, Writes


class SharedWeights(OptimizerState):
    """Optimizer state whose master weights share storages with the model's weights.

    Attributes:
        masters: master weights.
    """

    check = staticmethod(check_shared_weights)

    @classmethod
    def built(cls, optimizer: Any, context: Context[None]) -> SharedWeights:
        """Move the weights of a new optimizer into shared storages."""
        share = _share_buckets if is_sharded(optimizer) else _share_parameters
        return cls(optimizer.optimizer, share(optimizer), StepIntegrity(context.feature))

    def __init__(self, inner: Any, masters: list[Master], integrity: StepIntegrity) -> None:
        self.integrity = integrity
        self.masters = Masters(masters, integrity)
        self._inner = inner

    @torch.no_grad()
    def step(self, call: Callable[[], bool]) -> bool:
        with self.masters.stepping(self._inner):
            return call()

    def master_to_model(self, call: Callable[[], None]) -> None:
        """Convert to pair form instead of copying master weights to the model."""
        # Megatron's copy is not called: float32 weights of the model are their own masters.
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
        result["fp32_from_fp16_params"] = [[self.masters.values(main) for main in group] for group in groups]
        return result

    @torch.no_grad()
    def load_state_dict(self, call: Callable[[], Any]) -> Any:
        """Load the state dict in master form, which needs no additional memory for master weights."""
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
    """Move each bfloat16 parameter into a storage shared with its master weight."""
    masters = []
    # One parameter at a time: each separate master weight is freed before the next storage is allocated.
    groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
    for models, mains in groups:
        for model, main in zip(models, mains, strict=True):
            if model.dtype is not torch.bfloat16:  # a float32 weight is its own master
                continue
            storage = InPlaceStorage(model.numel(), model.device)
            storage.weights.copy_(model.data.flatten())
            model.data = storage.weights.view(model.shape)
            masters.append(Master(main, storage, 0))
            main.data = storage.master.view(model.shape)  # frees the separate master weight
    return masters


@torch.no_grad()
def _share_buckets(optimizer: Any) -> list[Master]:
    """Let master weights share bucket memory; with one data parallel rank, move the buffer to new memory."""
    models = [model for group in optimizer.model_float16_groups for model in group]
    mains = [main for group in optimizer.shard_fp32_from_float16_groups for main in group]
    for main in mains:  # free the separate master weights, which still equal the bfloat16 weights
        main.data = torch.zeros((), dtype=main.dtype, device=main.device).expand(main.shape)
    storages: dict[tuple[int, int], SharedStorage] = {}
    for number, buffer in enumerate(optimizer.buffers):
        if buffer.param_dtype is not torch.bfloat16:
            continue
        rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
        if size == 1:  # no neighbour's shard to cover with the master form
            whole = _move_buffer(optimizer, buffer)
        for place, bucket in enumerate(buffer.buckets):
            storages[number, place] = (
                whole if size == 1 else OverBucketStorage(bucket.param_data.view(-1), rank, size)
            )
    masters = []
    for model, main in zip(models, mains, strict=True):
        number, _, place = optimizer.model_param_gbuf_map[model]
        storage = storages[number, place]
        which = "gbuf_world" if isinstance(storage, InPlaceStorage) else "gbuf_local"
        masters.append(Master(main, storage, optimizer._get_model_param_range_map(model)[which].start))
    return masters


def _move_buffer(optimizer: Any, buffer: Any) -> InPlaceStorage:
    """Move a parameter buffer, and repoint all its views: buckets, parameters and shards."""
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
                # Make a new view: assigning to `.data` would leave the view's base, and so the old storage,
                # alive.
                shard = model.detach().view(-1)[span.start : span.end]
                shard.__dict__.update(shards[place].__dict__)
                shards[place] = shard
    for chunk in optimizer.model_chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            releases.forget_shards(group)
    return storage


@dataclass(frozen=True)
class Master:
    """Master weight and its position in a shared storage.

    Attributes:
        tensor: float32 tensor that Megatron and the optimizer hold.
        storage: shared storage of its values.
        start: position of its first number in the storage.
    """

    tensor: Tensor
    storage: SharedStorage
    start: int

    def values(self) -> Tensor:
        """Return a float32 copy in the tensor's shape."""
        return self.storage.read(self.start, self.start + self.tensor.numel()).view(self.tensor.shape)


class Masters:
    """All master weights of an optimizer that share storages with model weights; initially in pair form.

    Args:
        masters: master weights.
        integrity: record of broken steps, marked by a step that fails after writing weights.

    Attributes:
        storages: shared storages without duplicates.
        in_master_form: whether the master tensors have memory and hold the values.
    """

    def __init__(self, masters: Sequence[Master], integrity: StepIntegrity) -> None:
        self._by_tensor = {master.tensor: master for master in masters}
        self.storages = list({id(master.storage): master.storage for master in masters}.values())
        self.in_master_form = False
        self._integrity = integrity
        self._is_changing = False
        self._freed = FreedStorage()
        for master in masters:
            self._freed.free(master.tensor)

    def to_master(self) -> None:
        """Convert to master form, in which master tensors have values and bfloat16 weights are invalid."""
        self._is_changing = True
        for storage in self.storages:
            storage.to_master()
        for master in self._by_tensor.values():
            end = master.start + master.tensor.numel()
            master.tensor.data = master.storage.master[master.start : end].view(master.tensor.shape)
        # Still set after an exception above, so that `stepping` knows that weights are lost.
        self.in_master_form, self._is_changing = True, False

    def to_pairs(self) -> None:
        """Convert to pair form, in which bfloat16 weights are valid, and free the master tensors."""
        self._is_changing = True
        for master in self._by_tensor.values():
            self._freed.free(master.tensor)
        for storage in self.storages:
            storage.to_pairs()
        self.in_master_form, self._is_changing = False, False

    @contextlib.contextmanager
    def stepping(self, optimizer: Any) -> Iterator[None]:
        """Convert to master form for a step; :meth:`to_pairs` in the step converts back.

        A step that fails before any write leaves the weights unchanged. After a later failure, stock Megatron
        would have old model weights and new master weights, which one storage cannot hold. Here the model
        weights are then made from the new master weights, and the state is marked broken. Lost weights become
        NaN: other ranks' weights that the master form overwrote, and all weights if a conversion has failed.

        Args:
            optimizer: inner optimizer.
        """
        writes = None
        try:
            self.to_master()
            writes = Writes(optimizer, list(self._by_tensor))
            yield
        except BaseException:
            if self.in_master_form and not self._is_changing:
                if writes is None or writes.may_have_happened():
                    self._integrity.mark_broken(self._by_tensor)
                with contextlib.suppress(Exception):  # report the first exception, not this one
                    self.to_pairs()
            self._spoil_what_is_lost()
            raise

    def _spoil_what_is_lost(self) -> None:
        """Set weights that a failed step has lost to NaN."""
        if self._is_changing:
            for master in self._by_tensor.values():
                self._freed.free(master.tensor)
            for storage in self.storages:
                storage.spoil()
            self.in_master_form, self._is_changing = False, False
            self._integrity.mark_broken(self._by_tensor)
        for storage in self.storages:
            if storage.spoil_others():
                self._integrity.mark_broken(self._by_tensor)

    def values(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor's master values, or ``tensor`` itself if it is not a master weight."""
        return self._by_tensor[tensor].values() if tensor in self._by_tensor else tensor

    @contextlib.contextmanager
    def opened(self, tensors: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Fill master tensors (default: all) with copies of the float32 weights, and write them back on exit.

        Unlike :meth:`to_master`, this method does not overwrite other ranks' weights in a bucket.
        """
        masters = self._by_tensor.values() if tensors is None else self._known(tensors)
        for master in masters:
            master.tensor.data = master.values()
        try:
            yield
        finally:
            for master in masters:
                master.storage.write(master.start, master.tensor.data.flatten())
                self._freed.free(master.tensor)

    def drop_lower_halves(self) -> None:
        """Set the float32 weights to the values of the bfloat16 weights."""
        for storage in self.storages:
            storage.drop_lower_halves()

    def _known(self, tensors: Sequence[Tensor]) -> list[Master]:
        return [self._by_tensor[tensor] for tensor in tensors if tensor in self._by_tensor]
