"""Matmul and collective in one operator of torch_npu (MC2), with the functions of ``parallel/chunked.py``.

The operators cut the work into chunks themselves, so the number of chunks has no effect here. Limits and
signatures are those of torch_npu's manual of ``npu_all_gather_base_mm`` and ``npu_mm_reduce_scatter_base``.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.features.tensor_parallel.overlap import chunked
from mindspeed_dsa.features.tensor_parallel.overlap.chunked import Allocate, Gather
from mindspeed_dsa.ops.npu.device import listed, product
from mindspeed_dsa.parallel.transfers import Pending

__all__ = ["BESIDE_COLLECTIVES", "Gather", "declines", "gather_matmul", "matmul_scatter"]

BESIDE_COLLECTIVES = False
"""All operators of a communicator use its one buffer, and HCCL wants them called one after the other."""
_WIDTHS = range(256, 65535)
# Of what is summed over ranks.
_MOST_BYTES = 4 << 30


def declines(weight: Tensor, group: Any) -> str:
    """Return why the operators do not support a layer; empty if they do.

    Args:
        weight: ``[out, in]`` of one rank. Both widths are contraction sizes, one of them in backward.
        group: tensor parallel group.
    """
    if weight.dtype not in (torch.float16, torch.bfloat16):
        return f"they support fp16 and bf16, not {str(weight.dtype)[6:]}"
    ranks = product().fused_ranks
    if group.size() not in ranks:
        return f"they support {listed(ranks)} ranks on this device, {product().name}, not {group.size()}"
    if outside := [width for width in weight.shape if width not in _WIDTHS]:
        return f"they support widths of {_WIDTHS.start} to {_WIDTHS.stop - 1}, not {outside[0]}"
    return ""


def gather_matmul(
    local: Tensor, weight: Tensor, group: Any, chunks: int, allocate: Allocate | None = None
) -> tuple[Tensor, Tensor]:
    """Do as :func:`chunked.gather_matmul`, in as many chunks as the operator chooses.

    ``weight`` is contiguous or the transpose of a contiguous tensor; ``allocate`` is unused, gathered rows
    always belong to the caller.
    """
    product, whole = _torch_npu().npu_all_gather_base_mm(
        local, weight, communicator(group), group.size(), bias=None, gather_index=0, gather_output=True
    )
    return product, whole


def matmul_scatter(whole: Tensor, weight: Tensor, group: Any, chunks: int) -> Pending:
    """Do as :func:`chunked.matmul_scatter`, in as many chunks as the operator chooses.

    ``whole`` is contiguous, ``weight`` too or its transpose is. The only wait is for the device's stream,
    unless the product is larger than the operator takes: then it is multiplied first and scattered then.
    """
    if whole.size(0) * weight.size(1) * whole.itemsize > _MOST_BYTES:
        return chunked.matmul_scatter(whole, weight, group, 1)
    mine = _torch_npu().npu_mm_reduce_scatter_base(
        whole, weight, communicator(group), group.size(), reduce_op="sum", bias=None
    )
    return Pending(mine, [], [])


@lru_cache(maxsize=64)
def communicator(group: Any) -> str:
    """Return the name of the group's HCCL communicator, which the operators take."""
    backend = group._get_backend(torch.device("npu"))
    name: str = backend.get_hccl_comm_name(dist.get_global_rank(group, dist.get_rank(group)))
    return name


def _torch_npu() -> Any:
    return import_module("torch_npu")
