"""Host storage of the state of Megatron's optimizers.

The master weight tensors are keys of the optimizer's state and have the gradients, so they remain on the
device, but without memory. When Megatron reads or writes master weights outside of a step, they are replaced
by the host tensors for the duration of that call.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.memory.optimizer_memory import FreedStorage, StateWithMoments
from mindspeed_dsa.features.memory.swap_optimizer.feature import Options, check_swapped_state
from mindspeed_dsa.megatron.optimizer import OptimizerState, Place, is_sharded
from mindspeed_dsa.optimizers.integrity import StepIntegrity
from mindspeed_dsa.optimizers.moments import Moments, replaced
from mindspeed_dsa.optimizers.step_pipeline import Chunk, Parameter, Pipeline, Slab
from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.platforms import host_pool
from mindspeed_dsa.platforms.base import Event

_Function = Callable[..., Any]
_WAITING = "_mindspeed_dsa_swapped"
_LISTS = ("fp32_from_float16_groups", "shard_fp32_from_float16_groups")


class _Construction:
    """Holder of ``freed``: placeholder memory of master weights while an optimizer is constructed."""

    def __init__(self, context: Context[Options]) -> None:
        self.freed: FreedStorage | None = None


class GatherAlone(OptimizerState):
    """State of an optimizer without parameters, because this rank's shards of all buckets are empty.

    Other ranks all-gather buckets during the step, so this rank must all-gather them in the same order.
    """

    def __init__(self, optimizer: Any, integrity: StepIntegrity) -> None:
        self.integrity = integrity
        self._gather = EarlyGather(BucketOrder(optimizer).groups, [])

    def step(self, call: Callable[[], bool]) -> bool:
        if not platforms.current().asynchronous:
            return call()
        with self._gather.with_nothing_to_update():
            return call()


class SwappedState(StateWithMoments):
    """Host state of one of Megatron's optimizers.

    Attributes:
        pipeline: pipeline that runs the optimizer steps.
    """

    check = staticmethod(check_swapped_state)

    @classmethod
    @contextlib.contextmanager
    def constructing(cls, context: Context[Options]) -> Iterator[None]:
        """Free the memory of each master weight right after its creation."""
        construction = context.state(_Construction)
        before, construction.freed = construction.freed, FreedStorage()
        try:
            yield
        finally:
            construction.freed = before

    @classmethod
    @torch.no_grad()
    def built(cls, optimizer: Any, context: Context[Options]) -> OptimizerState | None:
        """Allocate the state of a new optimizer on the host."""
        parameters = list(_parameters(optimizer))
        integrity = StepIntegrity(context.feature)
        if not parameters:
            return GatherAlone(optimizer, integrity) if _gathers_after_steps(optimizer) else None
        host_pool.require_host_memory(
            4 * sum(param.rows * param.piece.numel() for param in parameters),
            context.feature,
            "use more data parallel ranks with --use-distributed-optimizer or --use-torch-fsdp2, fewer "
            "processes on a host, or omit --swap-optimizer",
        )
        state = cls(optimizer, parameters, context.options.parts, integrity)
        for chunk in getattr(optimizer, "model_chunks", ()):
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                # A weak reference: the model may outlive the optimizer.
                vars(group).setdefault(_WAITING, weakref.WeakSet()).add(state)
        return state

    def __init__(
        self, optimizer: Any, parameters: list[Parameter], times: int, integrity: StepIntegrity
    ) -> None:
        self._optimizer = optimizer
        # Three rows: master weight and both moments. Two rows: the moments of a float32 model weight.
        kinds = ([param for param in parameters if param.rows == rows] for rows in (3, 2))
        slabs = [Slab(kind) for kind in kinds if kind]
        rows = {param: slab.of(param) for slab in slabs for param in slab.parameters}
        self._weights = {param.main: param.weights for param in parameters if param.weights is not None}
        self._masters = {param.main: rows[param][0] for param in parameters if param.main in self._weights}
        places = {param.main: (rows[param][-2], rows[param][-1]) for param in parameters}
        super().__init__(optimizer, Moments(optimizer.optimizer, places), integrity)
        self.pipeline = Pipeline(optimizer.optimizer, slabs, self.moments, times, integrity)
        self._freed = FreedStorage()
        self._gather: EarlyGather | None = None
        if _gathers_after_steps(optimizer):
            self._gather = EarlyGather(BucketOrder(optimizer).groups, self.pipeline.chunks)
        self.reload()

    def master(self, main: Tensor) -> Tensor:
        """Return the float32 master weight on the host, or ``main`` itself if it is the model's weight."""
        return self._masters.get(main, main)

    @torch.no_grad()
    def reload(self) -> None:
        """Copy the model's weights to the master weights on the host, one tensor at a time."""
        self.pipeline.settle()
        for main, master in self._masters.items():
            master.view(-1).copy_(self._weights[main]())

    def load_early(self) -> None:
        """Start to load the first chunks of the next step, if the platform copies asynchronously.

        If device memory is insufficient, for example because of live activations, a later call tries again.
        """
        if platforms.current().asynchronous:
            with contextlib.suppress(torch.OutOfMemoryError):
                self.pipeline.prefetch()

    def before_grads(self) -> None:
        self.load_early()

    def after_skip(self) -> None:
        self.pipeline.discard()

    def step(self, call: Callable[[], bool]) -> bool:
        """Run the inner optimizer's step through the pipeline."""
        for main in self._masters:
            # A library that moves optimizers, such as verl, gives them memory.
            if local_of(main).untyped_storage().nbytes() > main.element_size():
                self._freed.free(main)
        inner = self._optimizer.optimizer
        step = partial(self.pipeline.step, inner.step)
        with contextlib.ExitStack() as stack:
            if self._gather is not None and platforms.current().asynchronous:
                step = partial(step, updated=stack.enter_context(self._gather.during_a_step()))
            stack.enter_context(replaced(inner, "step", step))
            # Megatron's call does more than the inner step, so it can also fail after a completed step.
            completed = self.pipeline.completed
            try:
                return call()
            except BaseException:
                # The pipeline has written model weights already; stock Megatron writes them after the step.
                if self._masters and self.pipeline.completed != completed:
                    self.pipeline.mark_broken()
                raise

    def master_to_model(self, call: Callable[[], None]) -> None:
        """Do nothing, because the pipeline writes the model's weights."""

    def model_to_master(self, call: Callable[[], None], from_state_dict: bool) -> None:
        if not from_state_dict:
            self.reload()
            return
        with self.on_the_host():
            call()

    def state_dict(self, call: Callable[[], Any]) -> Any:
        with self.on_the_host():
            return super().state_dict(call)

    def load_state_dict(self, call: Callable[[], Any]) -> Any:
        with self.on_the_host():
            return super().load_state_dict(call)

    def get_parameter(self, place: Place, call: Callable[[], Any]) -> Any:
        with self.keyed_on_the_host([place]):
            return call()

    def set_parameter(self, place: Place, call: Callable[[], None]) -> None:
        with self.keyed_on_the_host([place]):
            call()

    def load_parameters(self, call: Callable[[], None]) -> None:
        groups = enumerate(self._optimizer.optimizer.param_groups)
        places = [
            Place(number, index, main)
            for number, group in groups
            for index, main in enumerate(group["params"])
        ]
        with self.keyed_on_the_host(places):
            call()

    @contextlib.contextmanager
    def on_the_host(self) -> Iterator[None]:
        """Replace master weights by their host tensors in Megatron's lists."""
        self.pipeline.settle()
        with contextlib.ExitStack() as stack:
            for name in _LISTS:
                groups = getattr(self._optimizer, name, None)
                if groups is not None:
                    lists = [list(map(self.master, group)) for group in groups]
                    stack.enter_context(replaced(self._optimizer, name, lists))
            with torch.no_grad():
                yield

    @contextlib.contextmanager
    def keyed_on_the_host(self, places: list[Place]) -> Iterator[None]:
        """Replace master weights by their host tensors in the inner optimizer's param groups and state."""
        self.pipeline.settle()
        inner = self._optimizer.optimizer
        for group, index, main in places:
            inner.param_groups[group]["params"][index] = self.master(main)
            inner.state[self.master(main)] = inner.state[main]
        try:
            with torch.no_grad():
                yield
        finally:
            for group, index, main in places:
                inner.param_groups[group]["params"][index] = main
                if self.master(main) is not main:
                    del inner.state[self.master(main)]


def without_master(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``copy_tensor_model_parallel_attributes`` to free each new master weight."""
    construction = context.state(_Construction)

    # Megatron's optimizers call it once for each master weight that they create.
    def copy_tensor_model_parallel_attributes(destination_tensor: Any, source_tensor: Any) -> None:
        original(destination_tensor, source_tensor)
        freed = construction.freed
        if freed is not None and destination_tensor.dtype is torch.float32 is not source_tensor.dtype:
            freed.free(destination_tensor)  # its values are still in the model's weight

    return copy_tensor_model_parallel_attributes


def load_before_gradients(original: _Function) -> _Function:
    """Decorate ``_ParamAndGradBucketGroup.start_grad_sync`` to start loading optimizer state in backward."""

    # The first call of a step is in the last microbatch's backward, once a bucket has all its gradients.
    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        for swapped in getattr(self, _WAITING, ()):
            swapped.load_early()
        return original(self, *args, **kwargs)

    return start_grad_sync


def _parameters(optimizer: Any) -> Iterator[Parameter]:
    """Yield a :class:`Parameter` for each parameter of the inner optimizer."""
    weights: dict[Tensor, Callable[[], Tensor]] = {}
    positions: dict[Tensor, int] = {}
    if is_sharded(optimizer):
        order = BucketOrder(optimizer)
        for model, main in _pairs(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups):
            weights[main] = partial(_shard_in_bucket, optimizer, model)
            positions[main] = order.position(model)
        for model, main in _pairs(optimizer.model_fp32_groups, optimizer.shard_fp32_groups):
            positions[main] = order.position(model)
    elif hasattr(optimizer, "fp32_from_float16_groups"):
        for model, main in _pairs(optimizer.float16_groups, optimizer.fp32_from_float16_groups):
            weights[main] = partial(_flat, model)
    for index, group in enumerate(optimizer.optimizer.param_groups):
        for main in group["params"]:
            yield Parameter(main, index, weights.get(main), positions.get(main, 0))


def _gathers_after_steps(optimizer: Any) -> bool:
    return is_sharded(optimizer) and not optimizer.ddp_config.overlap_param_gather


def _pairs(models: list[list[Tensor]], mains: list[list[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of a model parameter and the tensor that the optimizer updates for it."""
    for model_group, main_group in zip(models, mains, strict=True):
        yield from zip(model_group, main_group, strict=True)


def _shard_in_bucket(optimizer: Any, model: Tensor) -> Tensor:
    """Return the parameter's range in this rank's shard of its bucket, which Megatron's all-gather reads."""
    span = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
    number, _, place = optimizer.model_param_gbuf_map[model]
    weights: Tensor = optimizer.buffers[number].buckets[place].param_data.view(-1)[span.start : span.end]
    return weights


def _flat(model: Tensor) -> Tensor:
    return local_of(model).detach().view(-1)


# -- gathering weights bucket by bucket while the rest of a step runs -----------------------------
#
# Megatron gathers all buckets after the step. Here each bucket group is gathered on a separate stream as soon
# as the chunks with this rank's part of it are updated. Megatron's own call then finds it gathered. Ranks
# have different parts of parameters and so different chunks, but gather the bucket groups in the same order.
# Ranks without any part join in.


_GATHERED = "_mindspeed_dsa_gathered"


class BucketOrder:
    """Bucket groups of a ``DistributedOptimizer``, in the order of Megatron's all-gathers.

    Args:
        optimizer: Megatron's ``DistributedOptimizer``.
    """

    def __init__(self, optimizer: Any) -> None:
        # A model chunk also has bucket groups of other optimizers, for example of expert parameters.
        own_buckets = {id(bucket) for buffer in optimizer.buffers for bucket in buffer.buckets}
        self.groups = [
            group
            for chunk in optimizer.model_chunks
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
            if group.buckets and id(group.buckets[0]) in own_buckets
        ]
        self._positions = {
            id(bucket): position for position, group in enumerate(self.groups) for bucket in group.buckets
        }
        self._optimizer = optimizer

    def position(self, model: Tensor) -> int:
        """Return the index of the group that gathers the parameter."""
        number, _, place = self._optimizer.model_param_gbuf_map[model]
        return self._positions[id(self._optimizer.buffers[number].buckets[place])]


class EarlyGather:
    """All-gathers of weight buckets during the optimizer step, each as soon as its weights are updated.

    Args:
        groups: bucket groups, in gathering order.
        chunks: chunks of a step; empty on a rank that has nothing to update.
    """

    def __init__(self, groups: Sequence[Any], chunks: Sequence[Chunk]) -> None:
        self._groups = list(groups)
        self._last = [-1] * len(groups)  # last chunk that each group waits for; -1: none
        for number, chunk in enumerate(chunks):
            for piece in chunk.pieces:
                self._last[piece.parameter.position] = number
        self._stream = platforms.current().new_stream()
        self._done = 0

    @contextmanager
    def during_a_step(self) -> Iterator[Callable[[int, Event], None]]:
        """Yield the callback for updated chunks, which starts the all-gathers that have become possible."""
        self._done = 0
        try:
            yield self._updated
        except BaseException:
            for group in self._groups:  # a later step must gather them again
                vars(group).pop(_GATHERED, None)
            raise
        platforms.current().current_stream().wait_stream(self._stream)

    @contextmanager
    def with_nothing_to_update(self) -> Iterator[None]:
        """All-gather all buckets, in the other ranks' order, in the step of a rank with nothing to update."""
        with self.during_a_step() as updated:
            event = platforms.current().new_event()
            event.record(platforms.current().current_stream())
            updated(0, event)  # all groups have `_last` -1, so this gathers all of them
            yield

    def _updated(self, number: int, event: Event) -> None:
        with platforms.current().use_stream(self._stream):
            while self._done < len(self._groups) and self._last[self._done] <= number:
                self._stream.wait_event(event)
                group = self._groups[self._done]
                group.start_param_sync()
                setattr(group, _GATHERED, True)
                self._done += 1


def unless_gathered(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``_ParamAndGradBucketGroup.start_param_sync`` to skip groups that are already gathered."""

    def start_param_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not vars(self).pop(_GATHERED, False):
            return original(self, *args, **kwargs)
        return None

    return start_param_sync
