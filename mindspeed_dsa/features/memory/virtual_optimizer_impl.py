"""Where Megatron's optimizers get moments that lie in host memory and are tensors of the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa import platforms, session
from mindspeed_dsa.features.host import host
from mindspeed_dsa.features.memory.combinations import require_movable_state
from mindspeed_dsa.features.memory.host_moments import Moments, attach, moments_of
from mindspeed_dsa.features.memory.virtual_optimizer import quota_of
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
    """

    def __init__(self, optimizer: Any, quota: float) -> None:
        chosen: list[Tensor] = []
        self.nbytes = 0
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if self.nbytes + _BYTES * parameter.numel() <= quota:
                chosen.append(parameter)
                self.nbytes += _BYTES * parameter.numel()
        host_pool.require_host_memory(self.nbytes, _WHO, "give --virtual-optimizer a smaller quota")
        self.moments = Moments(optimizer, dict(self._places(chosen)))

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
        moments = moments_of(self)
        if moments is not None:
            moments.begin_step()
        return bool(original(self))

    return step_with_ready_grads


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
