"""Grouped matmul on NVIDIA GPUs: torch's own kernels where they apply, and Triton kernels elsewhere.

The Triton kernel accumulates the weight gradient in place, which torch's kernels cannot do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.grouped_matmul.backends import Groups
from mindspeed_dsa.ops.grouped_matmul.triton_kernels import multiply_kernel, weight_gradient_kernel
from mindspeed_dsa.ops.triton.common import aligned, block, dense_rows, unsupported_here, widen
from mindspeed_dsa.ops.triton.launch import on_grid

READS_SIZES = False
# Limit because every program holds the ends of all groups.
_MOST_GROUPS = 1024


def unsupported(shape: ShapeClass) -> str | None:
    """Return why this backend cannot take calls of this shape, or None."""
    if shape["groups"] > _MOST_GROUPS:
        return f"its kernels take at most {_MOST_GROUPS} groups"
    return unsupported_here(shape)


def multiply(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Multiply ``[rows, in]`` and ``[groups, in, out]`` to ``[rows, out]``."""
    rows = dense_rows(rows)
    ends = groups.ends(rows.device)
    if _torch_takes(rows, weight):
        result: Tensor = F.grouped_mm(rows, weight, offs=ends)
        return result
    (count, width_in), (_, _, width_out) = rows.shape, weight.shape
    out = rows.new_empty(count, width_out)  # [rows, out]
    tiles = _tiles(rows.dtype, width_in, width_out)
    # Each group may end with a partial tile, so there is at most one more tile per group.
    most = triton.cdiv(count, tiles["BLOCK_M"]) + len(groups)
    on_grid(multiply_kernel, most, triton.cdiv(width_out, tiles["BLOCK_N"]))(
        rows,
        weight,
        out,
        ends,
        width_in,
        width_out,
        rows.stride(0),
        *weight.stride(),
        GROUPS=len(groups),
        BLOCK_G=triton.next_power_of_2(len(groups)),
        WIDEN=widen(rows),
        **tiles,
    )
    return out


def weight_gradient(
    rows: Tensor, grad_output: Tensor, groups: Groups, into: Tensor, accumulate: bool
) -> None:
    """Add ``rows.T @ grad_output`` of each group to ``into``, or overwrite it."""
    rows, grad_output = dense_rows(rows), dense_rows(grad_output)
    width_in, width_out = rows.shape[1], grad_output.shape[1]
    tiles = _tiles(rows.dtype, width_in, width_out)
    # Here BLOCK_K is a width of the result, and BLOCK_M is the dimension that is summed over.
    tiles["BLOCK_K"], tiles["BLOCK_M"] = min(tiles["BLOCK_M"], block(width_in)), tiles["BLOCK_K"]
    grid = (len(groups), triton.cdiv(width_in, tiles["BLOCK_K"]), triton.cdiv(width_out, tiles["BLOCK_N"]))
    on_grid(weight_gradient_kernel, *grid)(
        rows,
        grad_output,
        into,
        groups.ends(rows.device),
        width_in,
        width_out,
        rows.stride(0),
        grad_output.stride(0),
        *into.stride(),
        ACCUMULATE=accumulate,
        WIDEN=widen(rows),
        **tiles,
    )


def _tiles(dtype: torch.dtype, width_in: int, width_out: int) -> dict[str, Any]:
    # 64 rows, because experts have few rows. fp32 tiles take twice the memory, and their products no tensor
    # cores.
    m, n, k, stages = (64, 64, 32, 2) if dtype == torch.float32 else (64, 128, 64, 3)
    return {
        "BLOCK_M": m,
        "BLOCK_N": min(n, block(width_out)),
        "BLOCK_K": min(k, block(width_in)),
        "num_warps": 4,
        "num_stages": stages,
    }


def _torch_takes(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch's kernel needs no device synchronization: bf16 with 16-byte aligned rows."""
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and aligned(rows)
        and rows.stride(0) > 0  # dense_rows sets a single row's stride to 0, which torch does not accept
        and aligned(weight if weight.stride(2) == 1 else weight.transpose(1, 2))
    )
