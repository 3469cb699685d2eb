"""Rotation on NVIDIA GPUs: PyTorch's kernels, in few operations.

Liger-Kernel's rotates a query and its key together, in place, and Megatron hands over one tensor at a time.
"""

from __future__ import annotations

from mindspeed_dsa.ops.rotary.cpu import backward, forward, plan, tables, unsupported

__all__ = ["backward", "forward", "plan", "tables", "unsupported"]
