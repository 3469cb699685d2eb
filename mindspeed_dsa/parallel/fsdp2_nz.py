"""Weights in the blocks of an NPU's matrix unit (FRACTAL_NZ), written while FSDP2's gathered buffer is split.

For grouped matmuls that read their weight from these blocks. torch_npu still says ND of such a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.parallel.fsdp2_copy_out import Layout

SMALLEST = 128 * 4096 * 1536
"""Elements of a weight for which blocks pay."""
_BLOCK = 16


def blocks() -> Layout:
    """The layout, for :func:`fsdp2_copy_out.lay_out`.

    Raises:
        RuntimeError: this torch_npu lacks the operator.
    """
    if not hasattr(torch.ops.npu, "npu_special_slice"):
        raise RuntimeError(
            "fsdp2: this torch_npu has no npu_special_slice(self, dim, start, end, output), which splits and "
            "casts to NZ at once and is in no release; build torch_npu with it, or leave weights in ND"
        )
    return Layout(_write, _takes)


def _takes(whole: torch.Size, piece: torch.Size) -> bool:
    """Blocks must not be cut: rows of a matrix are, and a stack of experts is cut between them."""
    return whole.numel() >= SMALLEST and all(size % _BLOCK == 0 for size in piece[-2:])


def _write(gathered: Tensor, first: int, end: int, whole: Tensor) -> None:
    torch.ops.npu.npu_special_slice(gathered, 1, first, end, whole)
