"""Megatron's optimizers with moments that lie in host memory and are tensors of the device."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.memory.host_moments import Moments, StateWithMoments, replaced
from mindspeed_dsa.features.memory.virtual_optimizer import kernel_moments
from mindspeed_dsa.features.memory.virtual_optimizer.feature import (
    Options,
    check_mapped_moments,
    check_quotas,
)
from mindspeed_dsa.megatron.configuration import require
from mindspeed_dsa.megatron.optimizer import Place
from mindspeed_dsa.megatron.whole_steps import WholeSteps
from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.platforms import host_pool

_BYTES = 8  # of a parameter's two moments
_living: weakref.WeakSet[MappedMoments] = weakref.WeakSet()
"""Those of all optimizers, which share a quota."""


class MappedMoments(StateWithMoments):
    """Moments on the host of one of Megatron's optimizers.

    Args:
        optimizer: Megatron's.
        quota: bytes for moments at most; parameters take from it in the optimizer's order, whole.
        context: the feature's.

    Attributes:
        nbytes: bytes on the host.
        megatron: whose optimizer it is.
    """

    check = staticmethod(check_mapped_moments)

    @classmethod
    def built(cls, optimizer: Any, context: Context[Options]) -> MappedMoments:
        """Give the moments of a new optimizer their places."""
        left = _quota(context) - sum(each.nbytes for each in _living if each.megatron == context.megatron)
        state = cls(optimizer, left, context)
        _living.add(state)
        return state

    def __init__(self, optimizer: Any, quota: float, context: Context[Options]) -> None:
        inner = optimizer.optimizer
        chosen: list[Tensor] = []
        self.nbytes = 0
        for parameter in (each for group in inner.param_groups for each in group["params"]):
            nbytes = _BYTES * local_of(parameter).numel()
            if self.nbytes + nbytes <= quota:
                chosen.append(parameter)
                self.nbytes += nbytes
        host_pool.require_host_memory(
            self.nbytes, context.feature, "give --virtual-optimizer a smaller quota"
        )
        self.megatron: Megatron = context.megatron
        self._inner = inner
        platform = platforms.current()
        if platform.mapped_by_kernels_only:
            require(context, lambda *_: kernel_moments.check_adamw(inner))
        moments = Moments(inner, dict(self._places(chosen)), platform.write_mapped)
        super().__init__(optimizer, moments, WholeSteps(context.feature))

    def step(self, call: Callable[[], bool]) -> bool:
        """Every parameter that is about to be updated has its moments."""
        self.moments.begin_step()
        if not platforms.current().mapped_by_kernels_only:
            return call()
        with replaced(self._inner, "step", partial(self._step_with_kernels, self._inner.step)):
            return call()

    def _step_with_kernels(self, rest: Callable[[], Any]) -> None:
        try:
            kernel_moments.step(self._inner, self.moments, rest)
        except BaseException:
            # Kernels update parameters in an order of their own.
            self.whole.tear(self.moments.places)
            raise

    def state_dict(self, call: Callable[[], Any]) -> Any:
        # The distributed optimizer saves the moments elsewhere.
        with contextlib.nullcontext() if self._is_sharded else self._copied():
            return super().state_dict(call)

    def get_parameter(self, place: Place, call: Callable[[], Any]) -> Any:
        with self._copied(parameters=[place.main]):
            return call()

    def set_parameter(self, place: Place, call: Callable[[], None]) -> None:
        with self._copied(parameters=[place.main], write_back=True):
            call()

    def load_parameters(self, call: Callable[[], None]) -> None:
        with self._copied(write_back=True):
            call()

    def _copied(self, **options: Any) -> AbstractContextManager[None]:
        """Moments in the optimizer's state that can be copied; see :func:`kernel_moments.copied`."""
        if not platforms.current().mapped_by_kernels_only:
            return contextlib.nullcontext()
        return kernel_moments.copied(self._inner, self.moments, **options)

    def _places(self, chosen: list[Tensor]) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        platform = platforms.current()
        if platform.mapped_by_kernels_only:
            # Kernels copy a view to the device and back. What is saved of these are copies, see _copied().
            for parameter in chosen:
                size = local_of(parameter).shape
                first, second = (platform.empty_mapped(size, torch.float32, owner=self) for _ in range(2))
                yield parameter, (first.zero_(), second.zero_())
            return
        numel = self.nbytes // 4
        # A padding number: Megatron's writer assumes that a tensor which fills its storage is never changed.
        memory = platform.empty_mapped([numel + 1], torch.float32, owner=self)
        first, second = memory.zero_()[:numel].view(2, numel // 2)
        start = 0
        for parameter in chosen:
            piece = local_of(parameter)
            span = slice(start, start + piece.numel())
            yield parameter, _of_kind(parameter, first[span].view_as(piece), second[span].view_as(piece))
            start = span.stop


def _of_kind(parameter: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of a shard are shards too, as the optimizer's own step takes them."""
    if local_of(parameter) is parameter:
        return first, second
    from mindspeed_dsa.parallel.local_shards import like  # torch has what that imports since 2.6

    return like(first, parameter), like(second, parameter)


def _quota(context: Context[Options]) -> float:
    """Bytes for this process, by its pipeline stage."""
    parallel_state = context.megatron("core.parallel_state")
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    require(context, check_quotas, SimpleNamespace(pipeline_model_parallel_size=stages))
    return context.options.quota(parallel_state.get_pipeline_model_parallel_rank(), stages)
