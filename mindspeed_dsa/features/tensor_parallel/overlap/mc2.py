"""Matmul and collective in one operator of torch_npu (MC2), with the interface of ``chunked.py``.

The operators choose their own chunks, so the number of chunks is ignored. Limits and signatures are from
torch_npu's manual of ``npu_all_gather_base_mm`` and ``npu_mm_reduce_scatter_base``.
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
"""Operators of a communicator share one buffer, and HCCL requires that they run one after another."""
_WIDTHS = range(256, 65535)
_MOST_BYTES = 4 << 30  # maximum size of the product that is summed over ranks


def declines(weight: Tensor, group: Any) -> str:
    """Return the reason why the operators do not support a layer; empty if they do.

    Args:
        weight: one rank's weight ``[out, in]``. Both widths are contraction sizes, one in forward and the
            other in backward.
        group: tensor parallel group.
    """
    if weight.dtype not in (torch.float16, torch.bfloat16):
        return f"they support fp16 and bf16, not {str(weight.dtype)[6:]}"
    ranks = product().fused_ranks
    if group.size() not in ranks:
        return f"they support {listed(ranks)} ranks on this device, {product().name}, not {group.size()}"
    # Backward contracts over the other dimension, so both widths must be in range.
    if outside := [width for width in weight.shape if width not in _WIDTHS]:
        return f"they support widths of {_WIDTHS.start} to {_WIDTHS.stop - 1}, not {outside[0]}"
    return ""


def gather_matmul(
    local: Tensor, weight: Tensor, group: Any, chunks: int, allocate: Allocate | None = None
) -> tuple[Tensor, Tensor]:
    """Gather and multiply like :func:`chunked.gather_matmul`, in chunks chosen by the operator.

    ``weight`` must be contiguous or the transpose of a contiguous tensor. ``allocate`` is unused, because the
    operator itself allocates the gathered rows.
    """
    product, whole = _torch_npu().npu_all_gather_base_mm(
        local, weight, communicator(group), group.size(), bias=None, gather_index=0, gather_output=True
    )
    return product, whole


def matmul_scatter(whole: Tensor, weight: Tensor, group: Any, chunks: int) -> Pending:
    """Multiply and reduce-scatter like :func:`chunked.matmul_scatter`, in chunks chosen by the operator.

    ``whole`` must be contiguous, and ``weight`` contiguous or the transpose of a contiguous tensor. The
    result is ready on the current stream. If the sizes exceed the operator's limit, the matmul finishes
    before a separate reduce-scatter.
    """
    if whole.size(0) * weight.size(1) * whole.itemsize > _MOST_BYTES:
        return chunked.matmul_scatter(whole, weight, group, 1)
    mine = _torch_npu().npu_mm_reduce_scatter_base(
        whole, weight, communicator(group), group.size(), reduce_op="sum", bias=None
    )
    return Pending(mine, [], [])


@lru_cache(maxsize=64)
def communicator(group: Any) -> str:
    """Return the name of the group's HCCL communicator, which the operators take as argument."""
    backend = group._get_backend(torch.device("npu"))
    name: str = backend.get_hccl_comm_name(dist.get_global_rank(group, dist.get_rank(group)))
    return name


def _torch_npu() -> Any:
    return import_module("torch_npu")
