"""RMSNorm as PyTorch has it."""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass

KIND: Literal["autograd"] = "autograd"


def unsupported(shape: ShapeClass) -> str | None:
    """None: the reference takes every shape."""
    return None


def plan(hidden: Tensor, weight: Tensor) -> Any:
    """None: the reference takes every call."""


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``[..., n]``."""
    return F.rms_norm(hidden, weight.shape, weight, eps)
