"""Megatron's two mixed precision optimizers with some weights in fp32.

``Float16OptimizerWithFloat16Params`` matches saved master weights with parameters by position, but its lists
omit fp32 weights, so the matches are wrong. Here every fp32 weight gets a master weight that shares its
memory. Checkpoints are then the same as for a job with only 16-bit weights.

``DistributedOptimizer`` updates fp32 weights in place and saves them by name. After loading, each rank has
fp32 values only in its own shard. If the checkpoint's model weights are 16-bit, the rest of the weight is
rounded. So the shards are all-gathered after loading.
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
"""Attributes of a parameter that its master does not get: its gradient buffer and its master."""


def count_fp32_weights_in(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``Float16OptimizerWithFloat16Params.__init__``: give every fp32 weight a master weight."""

    def __init__(self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        require(context, check_norm_weights, config)
        original(self, optimizer, config, *args, **kwargs)
        if not self.is_stub_optimizer and any(self.fp32_from_fp32_groups):
            _give_masters(self)
            # Disable Apex' multi-tensor copy for fp16: it assumes the first tensor's dtype for the whole
            # list.
            self._dummy_overflow_buf = None

    return __init__


def _give_masters(optimizer: Any) -> None:
    """Add fp32 weights to the lists of 16-bit weights, in the order of the optimizer's param groups."""
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
        for index, parameter in enumerate(group["params"]):
            model = model_of.get(id(parameter))
            if model is None:  # the parameter is frozen
                continue
            if parameter is model:
                parameter = group["params"][index] = model.main_param = _master_in_place(model)
                # State that the optimizer already has for the weight moves to its master.
                if model in inner.state:
                    inner.state[parameter] = inner.state.pop(model)
            pairs.append((model, parameter))
        models[:], masters[:] = ([pair[side] for pair in pairs] for side in (0, 1))
        wholes.clear()


def _master_in_place(model: Parameter) -> Tensor:
    """Return a tensor that shares a weight's memory but has its own gradient."""
    master = model.detach()
    for name, value in vars(model).items():
        if name not in _NOT_A_MASTERS:
            setattr(master, name, value)
    return master


def check_distributed(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``DistributedOptimizer.__init__``: check its configuration first."""

    def __init__(self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        require(context, check_norm_weights, config)
        original(self, optimizer, config, *args, **kwargs)

    return __init__


def gather_when_loaded(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate a loading method of ``DistributedOptimizer``: afterwards, gather fp32 weights."""

    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_stub_optimizer:
            return
        buffers = [buffer for buffer in self.buffers if buffer.param_dtype is torch.float32]
        for buffer in buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                whole = bucket.param_data.view(-1)
                shard = whole.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(whole, shard, group=group)

    return load
