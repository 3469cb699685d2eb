"""Adam's moments for Megatron's optimizers in host memory that is mapped into the device's address space.

On NPUs only kernels can access this memory. torch_npu documents only ``fill_``, ``zero_`` and its own AdamW
operator for it, so parameters with mapped moments are updated with that operator. For other code, such as
checkpointing, the optimizer's state temporarily has copies of the moments. Elementwise kernels make these
copies and write them back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.memory.optimizer_memory import StateWithMoments
from mindspeed_dsa.features.memory.virtual_optimizer.feature import (
    Options,
    check_mapped_moments,
    check_quotas,
)
from mindspeed_dsa.megatron.configuration import require
from mindspeed_dsa.megatron.optimizer import Place
from mindspeed_dsa.optimizers.integrity import StepIntegrity
from mindspeed_dsa.optimizers.moments import MOMENTS, Moments, is_torch_adam, replaced
from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.platforms import host_pool

_BYTES = 8  # two float32 moments per element of a parameter
_living: weakref.WeakSet[MappedMoments] = weakref.WeakSet()
"""Moments of all live optimizers, which share one quota."""


class MappedMoments(StateWithMoments):
    """Host moments of one of Megatron's optimizers.

    Args:
        optimizer: Megatron's optimizer.
        quota: maximum bytes for moments. It is assigned to parameters in the optimizer's order; parameters
            that do not fit are skipped.
        context: context of the feature.

    Attributes:
        nbytes: size of the moments on the host.
        megatron: Megatron package of the optimizer.
    """

    check = staticmethod(check_mapped_moments)

    @classmethod
    def built(cls, optimizer: Any, context: Context[Options]) -> MappedMoments:
        """Allocate the moments of a new optimizer, within the quota that other optimizers leave."""
        left = _quota(context) - sum(each.nbytes for each in _living if each.megatron == context.megatron)
        state = cls(optimizer, left, context)
        _living.add(state)
        return state

    def __init__(self, optimizer: Any, quota: float, context: Context[Options]) -> None:
        inner = optimizer.optimizer
        mapped: list[Tensor] = []
        self.nbytes = 0
        for parameter in (each for group in inner.param_groups for each in group["params"]):
            # A parameter that does not fit is skipped, and smaller ones after it may still fit.
            nbytes = _BYTES * local_of(parameter).numel()
            if self.nbytes + nbytes <= quota:
                mapped.append(parameter)
                self.nbytes += nbytes
        host_pool.require_host_memory(
            self.nbytes, context.feature, "give --virtual-optimizer a smaller quota"
        )
        self.megatron: Megatron = context.megatron
        self._inner = inner
        platform = platforms.current()
        if platform.mapped_by_kernels_only:
            require(context, lambda *_: check_adamw(inner))
        moments = Moments(inner, dict(self._places(mapped)), platform.write_mapped)
        super().__init__(optimizer, moments, StepIntegrity(context.feature))

    def step(self, call: Callable[[], bool]) -> bool:
        """Make sure that every parameter with a gradient has its moments, then step."""
        self.moments.begin_step()
        if not platforms.current().mapped_by_kernels_only:
            return call()
        with replaced(self._inner, "step", partial(self._step_with_kernels, self._inner.step)):
            return call()

    def _step_with_kernels(self, rest: Callable[[], Any]) -> None:
        try:
            step_with_kernels(self._inner, self.moments, rest)
        except BaseException:
            # Kernels update parameters in their own order, so a failed step leaves an unknown mixture.
            self.integrity.mark_broken(self.moments.places)
            raise

    def state_dict(self, call: Callable[[], Any]) -> Any:
        # The distributed optimizer saves its moments through `get_parameter`.
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
        """Call :func:`copied_moments` if only kernels can access the memory, else do nothing."""
        if not platforms.current().mapped_by_kernels_only:
            return contextlib.nullcontext()
        return copied_moments(self._inner, self.moments, **options)

    def _places(self, chosen: list[Tensor]) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        platform = platforms.current()
        if platform.mapped_by_kernels_only:
            # One allocation per moment: kernels would copy a view to the device and back. Checkpoints get
            # copies of the moments, see `_copied`.
            for parameter in chosen:
                size = local_of(parameter).shape
                first, second = (platform.empty_mapped(size, torch.float32, owner=self) for _ in range(2))
                yield parameter, (first.zero_(), second.zero_())
            return
        numel = self.nbytes // 4
        # One extra number: Megatron's writer assumes that a tensor which fills its storage never changes.
        memory = platform.empty_mapped([numel + 1], torch.float32, owner=self)
        first, second = memory.zero_()[:numel].view(2, numel // 2)
        start = 0
        for parameter in chosen:
            piece = local_of(parameter)
            span = slice(start, start + piece.numel())
            yield parameter, _of_kind(parameter, first[span].view_as(piece), second[span].view_as(piece))
            start = span.stop


def _of_kind(parameter: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the moments as ``DTensor`` objects if the parameter is one, as the optimizer's step expects."""
    if local_of(parameter) is parameter:
        return first, second
    from mindspeed_dsa.parallel.local_shards import like  # imports names that torch has since 2.6

    return like(first, parameter), like(second, parameter)


def _quota(context: Context[Options]) -> float:
    parallel_state = context.megatron("core.parallel_state")
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    require(context, check_quotas, SimpleNamespace(pipeline_model_parallel_size=stages))
    return context.options.quota(parallel_state.get_pipeline_model_parallel_rank(), stages)


# -- moments that only kernels can access ---------------------------------------------------------


def check_adamw(optimizer: Any) -> Iterator[str]:
    """Yield an error if torch_npu's AdamW operator computes a different update than the inner optimizer."""
    if not is_torch_adam(optimizer) or any(
        group["weight_decay"] and not group["decoupled_weight_decay"] for group in optimizer.param_groups
    ):
        yield (
            "on NPUs only torch_npu's AdamW operator updates moments in swapped memory, and this optimizer "
            "is another one; use decoupled weight decay without Apex, or omit --virtual-optimizer"
        )


@contextlib.contextmanager
def copied_moments(
    optimizer: Any, moments: Moments, parameters: Sequence[Tensor] | None = None, write_back: bool = False
) -> Iterator[None]:
    """Put copies of the moments into the optimizer's state inside the block.

    Args:
        optimizer: inner optimizer.
        moments: moments of the optimizer.
        parameters: parameters to copy the moments of; default: all.
        write_back: whether to write the copies back to the mapped memory.
    """
    platform = platforms.current()
    chosen = moments.places if parameters is None else parameters
    mapped = {param: optimizer.state[param] for param in chosen if param in moments.places}
    for parameter, state in mapped.items():
        # A new dict, because a state dict may keep a reference to it.
        optimizer.state[parameter] = {
            key: platform.read_mapped(value) if key in MOMENTS else value for key, value in state.items()
        }
    try:
        yield
    finally:
        for parameter, state in mapped.items():
            if write_back:
                for key in MOMENTS:
                    platform.write_mapped(state[key], optimizer.state[parameter][key])
            optimizer.state[parameter] = state


@torch.no_grad()
def step_with_kernels(optimizer: Any, moments: Moments, rest: Callable[[], Any]) -> None:
    """Update parameters with mapped moments by torch_npu's operator, and all others by calling ``rest``."""
    hidden: dict[Tensor, Tensor] = {}
    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter in moments.places:
                    apply_adamw(parameter, moments.begin(parameter, group), group)
                    # Without a gradient, the optimizer's own step skips the parameter.
                    hidden[parameter], parameter.grad = parameter.grad, None
        rest()
    finally:
        for parameter, gradient in hidden.items():
            parameter.grad = gradient


def apply_adamw(parameter: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """Apply torch_npu's AdamW in place to a parameter and its moments.

    Args:
        parameter: parameter with a gradient of the same dtype.
        state: dict with ``step``, which is incremented, and the moments.
        group: param group with torch's Adam hyperparameters.
    """
    import torch_npu

    (beta1, beta2), before = group["betas"], float(state["step"])
    state["step"] += 1
    torch_npu.npu_apply_adam_w(
        beta1**before,
        beta2**before,
        float(group["lr"]),
        group["weight_decay"],
        beta1,
        beta2,
        group["eps"],
        local_of(cast(Tensor, parameter.grad)),
        None,
        False,
        bool(group["maximize"]),
        out=(local_of(parameter).data, *(state[key] for key in MOMENTS)),
    )
