"""Where Megatron's optimizers meet state that lies on the host.

The master weights, which are keys of the optimizer's state and carry the gradients, stay as tensors on the
device, without numbers: views of one NaN. What Megatron reads and writes of them outside of a step, it
finds on the host instead, for the length of that call.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa import platforms, session
from mindspeed_dsa.features.memory.combinations import require_movable_state
from mindspeed_dsa.features.memory.early_gather import BucketOrder, EarlyGather
from mindspeed_dsa.features.memory.host_moments import Moments, attach, replaced
from mindspeed_dsa.features.memory.host_slab import Parameter, Slab
from mindspeed_dsa.features.memory.masters import Voids
from mindspeed_dsa.features.memory.step_pipeline import Pipeline
from mindspeed_dsa.platforms import host_pool

_Function = Callable[..., Any]
_ATTRIBUTE = "_mindspeed_dsa_swapped"
_GATHER_ALONE = "_mindspeed_dsa_gather_alone"
_WAITING = "_mindspeed_dsa_swapped"
# The name that torch has for it since 2.5, and the one before.
_OUT_OF_MEMORY = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
_LISTS = ("fp32_from_float16_groups", "shard_fp32_from_float16_groups")
_voids: ContextVar[Voids | None] = ContextVar("voids", default=None)


class Swapped:
    """State on the host of one of Megatron's optimizers.

    Attributes:
        moments: where the inner optimizer's state has them.
        pipeline: what a step is done with.
    """

    def __init__(self, optimizer: Any, parameters: list[Parameter], times: int) -> None:
        self._optimizer = optimizer
        kinds = ([each for each in parameters if each.rows == rows] for rows in (3, 2))
        slabs = [Slab(kind) for kind in kinds if kind]
        rows = {each: slab.of(each) for slab in slabs for each in slab.parameters}
        self._weights = {each.main: each.weights for each in parameters if each.weights is not None}
        self._masters = {each.main: rows[each][0] for each in parameters if each.main in self._weights}
        self.moments = Moments(
            optimizer.optimizer, {each.main: (rows[each][-2], rows[each][-1]) for each in parameters}
        )
        self.pipeline = Pipeline(optimizer.optimizer, slabs, self.moments, times)
        self._gather: EarlyGather | None = None
        if _gathers_after_steps(optimizer):
            self._gather = EarlyGather(BucketOrder(optimizer).groups, self.pipeline.chunks)
        self.reload()

    def master(self, main: Tensor) -> Tensor:
        """The float32 weight that ``main`` stands for, on the host; ``main`` if it is the model's weight."""
        return self._masters.get(main, main)

    @torch.no_grad()
    def reload(self) -> None:
        """The master weights become what the model's weights are, one after the other."""
        self.pipeline.settle()
        for main, master in self._masters.items():
            master.view(-1).copy_(self._weights[main]())

    def load_early(self) -> None:
        """Start to load for the step to come, where that goes on beside other work.

        Where the device has no memory yet, as in a backward whose activations are alive, a later call loads.
        """
        if platforms.current().asynchronous:
            with contextlib.suppress(_OUT_OF_MEMORY):
                self.pipeline.prefetch()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """The inner optimizer's step goes through the pipeline."""
        inner = self._optimizer.optimizer
        step = partial(self.pipeline.step, inner.step)
        with contextlib.ExitStack() as stack:
            if self._gather is not None and platforms.current().asynchronous:
                step = partial(step, updated=stack.enter_context(self._gather.during_a_step()))
            stack.enter_context(replaced(inner, "step", step))
            completed = self.pipeline.completed
            try:
                yield
            except BaseException:
                # Megatron's own step would not have written the model's weights yet; the pipeline has.
                if self._masters and self.pipeline.completed != completed:
                    self.pipeline.tear()
                raise

    @contextlib.contextmanager
    def on_the_host(self) -> Iterator[None]:
        """In its lists Megatron finds the master weights on the host."""
        self.pipeline.settle()
        with contextlib.ExitStack() as stack:
            for name in _LISTS:
                groups = getattr(self._optimizer, name, None)
                if groups is not None:
                    lists = [list(map(self.master, group)) for group in groups]
                    stack.enter_context(replaced(self._optimizer, name, lists))
            yield

    @contextlib.contextmanager
    def keyed_on_the_host(self, places: list[tuple[int, int]] | None = None) -> Iterator[None]:
        """In the inner optimizer's groups and state, too, master weights are those on the host.

        Args:
            places: numbers of group and parameter; by default all.
        """
        self.pipeline.settle()
        inner = self._optimizer.optimizer
        if places is None:
            groups = enumerate(inner.param_groups)
            places = [(index, at) for index, group in groups for at in range(len(group["params"]))]
        mains = [inner.param_groups[group]["params"][at] for group, at in places]
        for (group, at), main in zip(places, mains, strict=True):
            inner.param_groups[group]["params"][at] = self.master(main)
            inner.state[self.master(main)] = inner.state[main]
        try:
            yield
        finally:
            for (group, at), main in zip(places, mains, strict=True):
                inner.param_groups[group]["params"][at] = main
                if self.master(main) is not main:
                    del inner.state[self.master(main)]


def swapped_of(optimizer: Any) -> Swapped | None:
    """The state on the host of one of Megatron's optimizers, if it was built with the feature on."""
    found: Swapped | None = getattr(optimizer, _ATTRIBUTE, None)
    return found


def without_master(original: _Function) -> _Function:
    """Decorate ``copy_tensor_model_parallel_attributes``, called once for each new master weight."""

    def copy_tensor_model_parallel_attributes(destination_tensor: Any, source_tensor: Any) -> None:
        original(destination_tensor, source_tensor)
        voids = _voids.get()
        if voids is not None and destination_tensor.dtype is torch.float32 is not source_tensor.dtype:
            voids.void(destination_tensor)  # the weights it was made from are still there

    return copy_tensor_model_parallel_attributes


def with_state_on_the_host(original: _Function) -> _Function:
    """Decorate ``__init__`` of Megatron's optimizers."""

    def __init__(self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        require_movable_state("swap-optimizer", config)
        token = _voids.set(Voids())
        try:
            original(self, optimizer, config, *args, **kwargs)
        finally:
            _voids.reset(token)
        require_movable_state("swap-optimizer", config, getattr(self, "ddp_config", None))
        if not self.is_stub_optimizer:
            _swap(self)

    return __init__


def before_gradients_are_ready(original: _Function) -> _Function:
    """Decorate ``_ParamAndGradBucketGroup.start_grad_sync``, whose first call is in the last backward."""

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        for swapped in getattr(self, _WAITING, ()):
            swapped.load_early()
        return original(self, *args, **kwargs)

    return start_grad_sync


def while_gradients_are_prepared(original: _Function) -> _Function:
    """Decorate ``prepare_grads`` of an optimizer or a chain of them; a skipped step drops what is loaded."""

    def prepare_grads(self: Any) -> bool:
        parts = [swapped_of(each) for each in getattr(self, "chained_optimizers", [self])]
        for swapped in parts:
            if swapped is not None:
                swapped.pipeline.whole.require()  # of all parts, before the first of them makes its step
        for swapped in parts:
            if swapped is not None:
                swapped.load_early()
        skipped = bool(original(self))
        for swapped in parts:
            if swapped is not None and skipped:
                swapped.pipeline.discard()
        return skipped

    return prepare_grads


def through_the_pipeline(original: _Function) -> _Function:
    """Decorate ``step_with_ready_grads``."""

    def step_with_ready_grads(self: Any) -> bool:
        swapped, alone = swapped_of(self), vars(self).get(_GATHER_ALONE)
        with contextlib.ExitStack() as stack:
            if swapped is not None:
                stack.enter_context(swapped.stepping())
            elif alone is not None and platforms.current().asynchronous:
                stack.enter_context(alone.with_nothing_to_update())
            return bool(original(self))

    return step_with_ready_grads


def done_by_the_pipeline(original: _Function) -> _Function:
    """Decorate ``_copy_main_params_to_model_params``."""

    def _copy_main_params_to_model_params(self: Any) -> None:
        if swapped_of(self) is None:
            original(self)

    return _copy_main_params_to_model_params


def reloaded_on_the_host(original: _Function) -> _Function:
    """Decorate ``_copy_model_params_to_main_params``."""

    def _copy_model_params_to_main_params(self: Any, state_dict: Any = None) -> None:
        swapped = swapped_of(self)
        if swapped is None:
            original(self, state_dict=state_dict)
        elif state_dict is None:
            swapped.reload()
        else:
            with swapped.on_the_host(), torch.no_grad():
                original(self, state_dict=state_dict)

    return _copy_model_params_to_main_params


def from_the_host(original: _Function) -> _Function:
    """Decorate ``state_dict``."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        swapped = swapped_of(self)
        if swapped is None:
            return original(self, *args, **kwargs)
        swapped.pipeline.whole.require()
        with swapped.on_the_host(), torch.no_grad():
            return original(self, *args, **kwargs)

    return state_dict


def to_the_host(original: _Function) -> _Function:
    """Decorate ``load_state_dict``."""

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        swapped = swapped_of(self)
        if swapped is None:
            return original(self, *args, **kwargs)
        with swapped.on_the_host(), torch.no_grad():
            result = original(self, *args, **kwargs)
        if not _is_sharded(self):  # else the state of parameters comes apart from this
            swapped.pipeline.whole.all_loaded()
        return result

    return load_state_dict


def from_one_parameter(original: _Function) -> _Function:
    """Decorate ``_get_main_param_and_optimizer_states``."""

    def _get_main_param_and_optimizer_states(self: Any, model_param: Any) -> Any:
        swapped = swapped_of(self)
        if swapped is None:
            return original(self, model_param)
        swapped.pipeline.whole.require()
        with swapped.keyed_on_the_host([self.model_param_group_index_map[model_param]]), torch.no_grad():
            return original(self, model_param)

    return _get_main_param_and_optimizer_states


def to_one_parameter(original: _Function) -> _Function:
    """Decorate ``_set_main_param_and_optimizer_states``."""

    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> None:
        swapped = swapped_of(self)
        if swapped is None:
            original(self, model_param, tensors)
            return
        group, place = self.model_param_group_index_map[model_param]
        with swapped.keyed_on_the_host([(group, place)]), torch.no_grad():
            original(self, model_param, tensors)
        swapped.pipeline.whole.loaded(self.optimizer.param_groups[group]["params"][place])

    return _set_main_param_and_optimizer_states


def of_all_parameters(original: _Function) -> _Function:
    """Decorate ``load_parameter_state_from_dp_zero_legacy``."""

    def load_parameter_state_from_dp_zero_legacy(self: Any, state_dict: Any) -> None:
        swapped = swapped_of(self)
        with contextlib.nullcontext() if swapped is None else swapped.keyed_on_the_host(), torch.no_grad():
            original(self, state_dict)
        if swapped is not None:
            swapped.pipeline.whole.all_loaded()

    return load_parameter_state_from_dp_zero_legacy


@torch.no_grad()
def _swap(optimizer: Any) -> None:
    parameters = list(_parameters(optimizer))
    if not parameters:
        # This rank's part of the buckets is empty; other ranks gather them early, and in this order.
        if _gathers_after_steps(optimizer):
            setattr(optimizer, _GATHER_ALONE, EarlyGather(BucketOrder(optimizer).groups, []))
        return
    needed = 4 * sum(each.rows * each.main.numel() for each in parameters)
    host_pool.require_host_memory(
        needed,
        "swap-optimizer",
        "use more data parallel ranks with --use-distributed-optimizer, fewer processes on a host, or leave "
        "out --swap-optimizer",
    )
    running = session.current()
    times = running.settings.swap_optimizer_times if running else None
    swapped = Swapped(optimizer, parameters, 16 if times is None else times)
    setattr(optimizer, _ATTRIBUTE, swapped)
    attach(optimizer, swapped.moments)
    for chunk in getattr(optimizer, "model_chunks", ()):
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            # The model may outlive the optimizer.
            vars(group).setdefault(_WAITING, weakref.WeakSet()).add(swapped)


def _parameters(optimizer: Any) -> Iterator[Parameter]:
    """What is updated, each with a function that gives the model's weights."""
    weights: dict[Tensor, Callable[[], Tensor]] = {}
    positions: dict[Tensor, int] = {}
    if _is_sharded(optimizer):
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


def _is_sharded(optimizer: Any) -> bool:
    return hasattr(optimizer, "shard_fp32_from_float16_groups")


def _gathers_after_steps(optimizer: Any) -> bool:
    return _is_sharded(optimizer) and not optimizer.ddp_config.overlap_param_gather


def _pairs(models: list[list[Tensor]], mains: list[list[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The model's parameters with what the optimizer updates for them."""
    for model_group, main_group in zip(models, mains, strict=True):
        yield from zip(model_group, main_group, strict=True)


def _shard_in_bucket(optimizer: Any, model: Tensor) -> Tensor:
    """Where Megatron gathers the weights from: the parameter's part in this rank's shard of its bucket."""
    span = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
    number, _, place = optimizer.model_param_gbuf_map[model]
    weights: Tensor = optimizer.buffers[number].buckets[place].param_data.view(-1)[span.start : span.end]
    return weights


def _flat(model: Tensor) -> Tensor:
    return model.data.view(-1)
