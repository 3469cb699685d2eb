"""Fixes for HCCL where Megatron expects NCCL: fp64 all-reduce, and the device type of a backend.

Does not import Megatron, because Megatron is being imported when this module is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa import platforms

_Function = Callable[..., Any]

_REDUCTIONS: tuple[tuple[Any, Callable[[Tensor], Tensor]], ...] = (
    (dist.ReduceOp.SUM, lambda rows: rows.sum(0)),
    (dist.ReduceOp.AVG, lambda rows: rows.mean(0)),
    (dist.ReduceOp.MIN, lambda rows: rows.amin(0)),
    (dist.ReduceOp.MAX, lambda rows: rows.amax(0)),
    (dist.ReduceOp.PRODUCT, lambda rows: rows.prod(0)),
)


def reduce_doubles(original: _Function) -> _Function:
    """Decorate ``all_reduce`` to gather fp64 tensors of an NPU and reduce them on the host."""
    # HCCL does not reduce fp64. Megatron reduces times in fp64, one number each, and reads the result at
    # once.

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        reduce = None
        if tensor.dtype == torch.float64 and tensor.device.type == "npu":
            reduce = next((reduction for known, reduction in _REDUCTIONS if op == known), None)
        ranks = dist.get_world_size(group) if reduce is not None else 0
        # A rank outside the group has -1 ranks, and is left to the original.
        if reduce is None or ranks < 1:
            return original(tensor, op, group, async_op)
        gathered = tensor.new_empty(ranks * tensor.numel())
        work = dist.all_gather_into_tensor(gathered, tensor.reshape(-1), group, async_op)
        if work is not None:
            work.wait()
        # The device's vector units do not support fp64.
        tensor.copy_(reduce(gathered.cpu().view(ranks, *tensor.shape)))
        return work

    return all_reduce


def device_of_hccl(original: _Function) -> _Function:
    """Decorate ``get_device`` of Megatron's signal handler to return the NPU for HCCL."""

    def get_device(local_rank: int | None = None) -> Any:
        if "hccl" in dist.get_backend():
            return platforms.current().device
        return original(local_rank)

    return get_device
