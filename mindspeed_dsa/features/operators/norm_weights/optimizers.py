"""Megatron's two mixed precision optimizers with some weights in fp32.

``Float16OptimizerWithFloat16Params`` leaves weights in fp32 out of the lists by whose positions it pairs
saved masters with parameters, and so reads and writes wrong pairs. Here each of them has a master like any
other weight, in the same memory. Checkpoints are then those of a job whose weights all have 16 bits.

``DistributedOptimizer`` works on weights in fp32 in place, and saves them by their names. A rank reads the
part that it updates; what the model has of the rest was rounded if the checkpoint's model has 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.operators.norm_weights.feature import check_norm_weights
from mindspeed_dsa.megatron.configuration import require

_NOT_A_MASTERS = ("main_grad", "main_param")
"""Attributes of a parameter that say where its gradient and its master are."""


def count_fp32_weights_in(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``Float16OptimizerWithFloat16Params.__init__``."""

    def __init__(self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        require(context, check_norm_weights, config)
        original(self, optimizer, config, *args, **kwargs)
        if not self.is_stub_optimizer and any(self.fp32_from_fp32_groups):
            _give_masters(self)
            # Apex' kernel, which fp16 copies by, takes all tensors of a list for ones of the first's type.
            self._dummy_overflow_buf = None

    return __init__


def _give_masters(optimizer: Any) -> None:
    """List weights in fp32 with those of 16 bits, in the order of the optimizer's groups."""
    inner = optimizer.optimizer
    groups = zip(
        inner.param_groups,
        optimizer.float16_groups,
        optimizer.fp32_from_float16_groups,
        optimizer.fp32_from_fp32_groups,
        strict=True,
    )
    for group, models, masters, wholes in groups:
        model_of = {id(master): model for master, model in zip(masters, models, strict=True)}
        model_of |= {id(whole): whole for whole in wholes}
        pairs = []
        for at, parameter in enumerate(group["params"]):
            model = model_of.get(id(parameter))
            if model is None:  # it is not trained
                continue
            if parameter is model:
                parameter = group["params"][at] = model.main_param = _master_in_place(model)
                if model in inner.state:
                    inner.state[parameter] = inner.state.pop(model)
            pairs.append((model, parameter))
        models[:], masters[:] = ([pair[side] for pair in pairs] for side in (0, 1))
        wholes.clear()


def _master_in_place(model: Parameter) -> Tensor:
    """Return another tensor over a weight's memory, with a gradient of its own."""
    master = model.detach()
    for name, value in vars(model).items():
        if name not in _NOT_A_MASTERS:
            setattr(master, name, value)
    return master


def check_distributed(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``DistributedOptimizer.__init__``."""

    def __init__(self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        require(context, check_norm_weights, config)
        original(self, optimizer, config, *args, **kwargs)

    return __init__


def gather_when_loaded(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate a method of ``DistributedOptimizer`` that reads this rank's part of the weights."""

    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_stub_optimizer:
            return
        buffers = [buffer for buffer in self.buffers if buffer.param_dtype is torch.float32]
        for buffer in buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                whole = bucket.param_data.view(-1)
                own = whole.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(whole, own, group=group)

    return load
