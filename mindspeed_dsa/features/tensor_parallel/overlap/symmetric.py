"""Matmul and collective in one operator on PyTorch's symmetric memory (CUDA).

The module has the same functions as ``chunked.py``. The operators choose their own chunks, so the number of
chunks is ignored.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.features.tensor_parallel.overlap.chunked import Allocate, Gather
from mindspeed_dsa.parallel.transfers import Pending

__all__ = ["BESIDE_COLLECTIVES", "Gather", "declines", "gather_matmul", "matmul_scatter"]

BESIDE_COLLECTIVES = True
"""These operators exchange data through symmetric memory, and not through NCCL's communicator."""


def declines(weight: Tensor, group: Any) -> str:
    """Return the reason why the operators do not support a layer; empty if they do.

    Args:
        weight: one rank's weight ``[out, in]``.
        group: tensor parallel group.
    """
    if weight.device.type != "cuda":
        return f"they compute on CUDA, not on {weight.device.type}"
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"they support fp32, fp16 and bf16, not {str(weight.dtype)[6:]}"
    if not hasattr(_operators(), "fused_all_gather_matmul"):
        return "this release of PyTorch lacks them"
    return ""


def gather_matmul(
    local: Tensor, weight: Tensor, group: Any, chunks: int, allocate: Allocate | None = None
) -> tuple[Tensor, Tensor]:
    """Gather and multiply like ``chunked.gather_matmul``; ``chunks`` and ``allocate`` are ignored."""
    whole, (product,) = _operators().fused_all_gather_matmul(local, [weight], 0, group.group_name)
    return product, whole


def matmul_scatter(whole: Tensor, weight: Tensor, group: Any, chunks: int) -> Pending:
    """Multiply ``whole @ weight`` and reduce-scatter the rows of the product.

    Args:
        whole: ``[tp * rows, k]``, contiguous.
        weight: ``[k, n]``, any strides.
        group: tensor parallel group.
        chunks: ignored, because the operator chooses.

    Returns:
        Pending result ``[rows, n]``, ready on the current stream.
    """
    product = _operators().fused_matmul_reduce_scatter(whole, weight, "sum", 0, group.group_name)
    return Pending(product, [], [])


def _operators() -> Any:
    import_module("torch.distributed._symmetric_memory")  # registers the operators
    return torch.ops.symm_mem
