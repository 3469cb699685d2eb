"""Megatron's two mixed precision optimizers on storages that model and master weights share.

The master weights are freed in pair form: their numbers are the pairs' (``shared_storage.py``).

Master form lasts from the beginning of the step to where the model's weights are made. A skipped step never
gets there, and stays in pair form.
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
from mindspeed_dsa.megatron.optimizer import OptimizerState, Place, StepIntegrity, Writes, is_sharded


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
    """Move each bfloat16 parameter into a storage with its master weight, one after the other."""
    found = []
    groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
    for models, mains in groups:
        for model, main in zip(models, mains, strict=True):
            if model.dtype is not torch.bfloat16:  # a weight in float32 is its own master
                continue
            storage = InPlaceStorage(model.numel(), model.device)
            storage.weights.copy_(model.data.flatten())
            model.data = storage.weights.view(model.shape)
            found.append(Master(main, storage, 0))
            main.data = storage.master.view(model.shape)  # frees the separate master weight
    return found


@torch.no_grad()
def _share_buckets(optimizer: Any) -> list[Master]:
    """Lay master weights over buckets; on one data parallel rank move the buffer to a larger storage."""
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


@dataclass(frozen=True)
class Master:
    """One master weight.

    Attributes:
        tensor: float32, what Megatron and the optimizer hold.
        storage: where its numbers lie.
        start: position of its first number there.
    """

    tensor: Tensor
    storage: SharedStorage
    start: int

    def values(self) -> Tensor:
        """Return a copy in float32, shaped as the tensor."""
        return self.storage.read(self.start, self.start + self.tensor.numel()).view(self.tensor.shape)


class Masters:
    """All master weights of an optimizer whose numbers lie in shared storages, in pair form at first.

    Args:
        masters: the weights.
        integrity: broken by a step that fails and leaves other numbers than Megatron's would.

    Attributes:
        storages: each of them once.
        in_master_form: whether the tensors hold their numbers.
    """

    def __init__(self, masters: Sequence[Master], integrity: StepIntegrity) -> None:
        self._by_tensor = {each.tensor: each for each in masters}
        self.storages = list({id(each.storage): each.storage for each in masters}.values())
        self.in_master_form = False
        self._integrity = integrity
        self._is_changing = False
        self._freed = FreedStorage()
        for each in masters:
            self._freed.free(each.tensor)

    def to_master(self) -> None:
        """Let the tensors hold the float32 weights; the model's bfloat16 weights are gone meanwhile."""
        self._is_changing = True
        for storage in self.storages:
            storage.to_master()
        for each in self._by_tensor.values():
            end = each.start + each.tensor.numel()
            each.tensor.data = each.storage.master[each.start : end].view(each.tensor.shape)
        self.in_master_form, self._is_changing = True, False

    def to_pairs(self) -> None:
        """Let the model hold its bfloat16 weights; the tensors are freed."""
        self._is_changing = True
        for each in self._by_tensor.values():
            self._freed.free(each.tensor)
        for storage in self.storages:
            storage.to_pairs()
        self.in_master_form, self._is_changing = False, False

    @contextlib.contextmanager
    def stepping(self, optimizer: Any) -> Iterator[None]:
        """Take master form for a step, which makes the pairs again at its end.

        A step that fails before it has written anything leaves the weights as they were. Another one leaves
        Megatron with the old weights and new master weights, which do not fit in one storage: then the pairs
        are those of the new ones, and the state is that of no step. Weights that are lost are NaN: those
        of other ranks, which master form lies over, and all if changing the form has failed.

        Args:
            optimizer: the inner one.
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
                with contextlib.suppress(Exception):  # the first one is reported
                    self.to_pairs()
            self._spoil_what_is_lost()
            raise

    def _spoil_what_is_lost(self) -> None:
        """Write NaN for weights that a failed step has left nowhere."""
        if self._is_changing:
            for each in self._by_tensor.values():
                self._freed.free(each.tensor)
            for storage in self.storages:
                storage.spoil()
            self.in_master_form, self._is_changing = False, False
            self._integrity.mark_broken(self._by_tensor)
        for storage in self.storages:
            if storage.spoil_others():
                self._integrity.mark_broken(self._by_tensor)

    def values(self, tensor: Tensor) -> Tensor:
        """Return a copy of what ``tensor`` holds in master form; the tensor itself if it is none of these."""
        return self._by_tensor[tensor].values() if tensor in self._by_tensor else tensor

    @contextlib.contextmanager
    def opened(self, tensors: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Put copies of the float32 weights into ``tensors`` (all by default); write them back at the end.

        Unlike :meth:`to_master` it leaves everything else in a bucket as it is.
        """
        chosen = self._by_tensor.values() if tensors is None else self._known(tensors)
        for each in chosen:
            each.tensor.data = each.values()
        try:
            yield
        finally:
            for each in chosen:
                each.storage.write(each.start, each.tensor.data.flatten())
                self._freed.free(each.tensor)

    def drop_lower_halves(self) -> None:
        """Set the float32 weights to what the bfloat16 weights are."""
        for storage in self.storages:
            storage.drop_lower_halves()

    def _known(self, tensors: Sequence[Tensor]) -> list[Master]:
        return [self._by_tensor[tensor] for tensor in tensors if tensor in self._by_tensor]
