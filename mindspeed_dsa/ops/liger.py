"""Access to Liger-Kernel, a library of Triton kernels, and the limits that its operators share."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from mindspeed_dsa.ops.backend import ShapeClass

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Liger's rowwise kernels hold a row in one block of at most this many elements.
_WIDEST = 65536


def takes_device(device: str) -> bool:
    """Return whether Liger's kernels take tensors on a device of this type."""
    return device == "cuda"


def unavailable(shape: ShapeClass, width: int) -> str | None:
    """Return why Liger's kernels cannot take a call whose rows have ``width`` elements, or None."""
    if not takes_device(shape.device):
        return "Liger-Kernel runs on GPUs"
    if find_spec("liger_kernel") is None:
        return "the package 'liger-kernel' is not installed (pip install 'mindspeed_dsa[liger]')"
    if shape.dtype not in _DTYPES:
        return "Liger-Kernel takes fp32, bf16 and fp16"
    if width > _WIDEST:
        return f"Liger-Kernel takes rows of up to {_WIDEST}, not {width}"
    return None


def kernels(module: str) -> Any:
    """Return one of Liger's operator modules, such as ``rms_norm``."""
    return import_module(f"liger_kernel.ops.{module}")
