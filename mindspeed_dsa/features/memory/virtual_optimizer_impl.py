"""Where Megatron's optimizers get moments that lie in host memory and are tensors of the device."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa import platforms, session
from mindspeed_dsa.features.host import host
from mindspeed_dsa.features.memory import kernel_moments
from mindspeed_dsa.features.memory.combinations import require_movable_state
from mindspeed_dsa.features.memory.host_moments import Moments, attach, replaced
from mindspeed_dsa.features.memory.virtual_optimizer import quota_of
from mindspeed_dsa.features.memory.whole_steps import WholeSteps
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.platforms import host_pool

_Function = Callable[..., Any]
_ATTRIBUTE = "_mindspeed_dsa_virtual"
_WHO = "virtual-optimizer"
_BYTES = 8  # of a parameter's two moments
_living: weakref.WeakSet[Virtual] = weakref.WeakSet()


class Virtual:
    """Moments on the host of one of Megatron's optimizers.

    Args:
        optimizer: the inner optimizer.
        quota: bytes for moments at most; parameters take from it in the optimizer's order, whole.

    Attributes:
        nbytes: bytes on the host.
        moments: where the inner optimizer's state has them.
        whole: torn by a step that has failed where kernels make it, in an order of their own.
    """

    def __init__(self, optimizer: Any, quota: float) -> None:
        chosen: list[Tensor] = []
        self.nbytes = 0
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if self.nbytes + _BYTES * parameter.numel() <= quota:
                chosen.append(parameter)
                self.nbytes += _BYTES * parameter.numel()
        host_pool.require_host_memory(self.nbytes, _WHO, "give --virtual-optimizer a smaller quota")
        self._optimizer = optimizer
        platform = platforms.current()
        if platform.mapped_by_kernels_only:
            kernel_moments.require_adamw(optimizer)
        self.moments = Moments(optimizer, dict(self._places(chosen)), platform.write_mapped)
        self.whole = WholeSteps(_WHO)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Every parameter that is about to be updated has its moments."""
        self.whole.require()
        self.moments.begin_step()
        with contextlib.ExitStack() as stack:
            if platforms.current().mapped_by_kernels_only:
                step = partial(self._step_with_kernels, self._optimizer.step)
                stack.enter_context(replaced(self._optimizer, "step", step))
            yield

    def _step_with_kernels(self, rest: Callable[[], Any]) -> None:
        try:
            kernel_moments.step(self._optimizer, self.moments, rest)
        except BaseException:
            self.whole.tear(self.moments.places)
            raise

    def copied(self, **options: Any) -> AbstractContextManager[None]:
        """Moments in the optimizer's state that can be copied; see :func:`kernel_moments.copied`."""
        if not platforms.current().mapped_by_kernels_only:
            return contextlib.nullcontext()
        return kernel_moments.copied(self._optimizer, self.moments, **options)

    def _places(self, chosen: list[Tensor]) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        numel = self.nbytes // 4
        # A padding number: Megatron's writer takes a tensor that fills its storage for one nobody changes.
        memory = platforms.current().empty_mapped(numel + 1, torch.float32, owner=self)
        first, second = memory.zero_()[:numel].view(2, numel // 2)
        start = 0
        for parameter in chosen:
            span = slice(start, start + parameter.numel())
            yield parameter, (first[span].view(parameter.shape), second[span].view(parameter.shape))
            start = span.stop


def virtual_of(optimizer: Any) -> Virtual | None:
    """The moments on the host of one of Megatron's optimizers, if it was built with the feature on."""
    found: Virtual | None = getattr(optimizer, _ATTRIBUTE, None)
    return found


def with_moments_on_the_host(original: _Function) -> _Function:
    """Decorate ``__init__`` of Megatron's optimizers."""

    def __init__(self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        require_movable_state(_WHO, config)
        original(self, optimizer, config, *args, **kwargs)
        require_movable_state(_WHO, config, getattr(self, "ddp_config", None))
        if self.is_stub_optimizer:
            return
        virtual = Virtual(self.optimizer, _quota() - sum(each.nbytes for each in _living))
        _living.add(virtual)
        setattr(self, _ATTRIBUTE, virtual)
        attach(self, virtual.moments)

    return __init__


def with_places(original: _Function) -> _Function:
    """Decorate ``step_with_ready_grads``."""

    def step_with_ready_grads(self: Any) -> bool:
        virtual = virtual_of(self)
        with contextlib.nullcontext() if virtual is None else virtual.stepping():
            return bool(original(self))

    return step_with_ready_grads


def with_copies(original: _Function) -> _Function:
    """Decorate ``state_dict``."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        virtual = virtual_of(self)
        if virtual is None:
            return original(self, *args, **kwargs)
        virtual.whole.require()
        with virtual.copied():
            return original(self, *args, **kwargs)

    return state_dict


def whole_again(original: _Function) -> _Function:
    """Decorate ``load_state_dict`` of optimizers whose state dict has all of the state."""

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result, virtual = original(self, *args, **kwargs), virtual_of(self)
        if virtual is not None:
            virtual.whole.all_loaded()
        return result

    return load_state_dict


def with_copies_of_one(original: _Function) -> _Function:
    """Decorate ``_get_main_param_and_optimizer_states``."""

    def _get_main_param_and_optimizer_states(self: Any, model_param: Any) -> Any:
        virtual = virtual_of(self)
        if virtual is None:
            return original(self, model_param)
        virtual.whole.require()
        with virtual.copied(parameters=[_main(self, model_param)]):
            return original(self, model_param)

    return _get_main_param_and_optimizer_states


def written_back_to_one(original: _Function) -> _Function:
    """Decorate ``_set_main_param_and_optimizer_states``."""

    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> None:
        virtual = virtual_of(self)
        if virtual is None:
            original(self, model_param, tensors)
            return
        main = _main(self, model_param)
        with virtual.copied(parameters=[main], write_back=True):
            original(self, model_param, tensors)
        virtual.whole.loaded(main)

    return _set_main_param_and_optimizer_states


def written_back(original: _Function) -> _Function:
    """Decorate ``load_parameter_state_from_dp_zero_legacy``."""

    def load_parameter_state_from_dp_zero_legacy(self: Any, state_dict: Any) -> None:
        virtual = virtual_of(self)
        with contextlib.nullcontext() if virtual is None else virtual.copied(write_back=True):
            original(self, state_dict)
        if virtual is not None:
            virtual.whole.all_loaded()

    return load_parameter_state_from_dp_zero_legacy


def _main(optimizer: Any, model_param: Tensor) -> Tensor:
    group, place = optimizer.model_param_group_index_map[model_param]
    main: Tensor = optimizer.optimizer.param_groups[group]["params"][place]
    return main


def _quota() -> float:
    """Bytes for this process, by the running session's settings and its pipeline stage."""
    running = session.current()
    words = running.settings.virtual_optimizer if running else "all"
    parallel_state = host("core.parallel_state")
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    try:
        return quota_of(words, parallel_state.get_pipeline_model_parallel_rank(), stages)
    except ValueError as error:
        raise SettingsError(str(error)) from None
