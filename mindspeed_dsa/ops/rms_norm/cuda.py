"""RMSNorm on NVIDIA GPUs: Liger-Kernel's."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from mindspeed_dsa.ops import liger
from mindspeed_dsa.ops.backend import ShapeClass

KIND: Literal["autograd"] = "autograd"


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
    return liger.unavailable(shape, shape["hidden"])


def plan(hidden: Tensor, weight: Tensor) -> Any:
    """None: Liger-Kernel's operator takes every call."""


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``[..., n]``."""
    function = liger.kernels("rms_norm").LigerRMSNormFunction
    # "gemma" computes all of it in fp32, as PyTorch does. False: others may read the arriving gradient too.
    return function.apply(hidden, weight, eps, 0.0, "gemma", False)
