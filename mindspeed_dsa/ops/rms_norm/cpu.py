"""RMSNorm on CPUs: the norm of a row in one pass over it, and a backward of few operations."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass

KIND: Literal["gradients"] = "gradients"


def unsupported(shape: ShapeClass) -> str | None:
    """None: PyTorch's operations take every shape."""
    return None


def plan(hidden: Tensor, weight: Tensor) -> Any:
    """None: PyTorch's operations take every call."""


def forward(hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``[..., n]``, and ``[..., 1]`` what each row was multiplied by."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    length = torch.linalg.vector_norm(hidden, 2, -1, True, dtype=wide)
    rstd = torch.addcmul(_constant(eps, wide), length, length, value=1 / hidden.shape[-1]).rsqrt_()
    return (hidden * rstd).mul_(weight).to(hidden.dtype), rstd


@cache
def _constant(eps: float, dtype: torch.dtype) -> Tensor:
    """Made once: a model has few of them."""
    with torch.inference_mode(False):
        return torch.tensor(eps, dtype=dtype, device="cpu")


def backward(grad: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``hidden`` and of ``weight``."""
    grad = grad.to(rstd.dtype)
    normal = hidden * rstd
    product = grad * normal
    rows = tuple(range(hidden.dim() - 1))
    grad_weight = product.sum(rows) if rows else product
    mean = (product * weight).mean(-1, keepdim=True)
    grad_hidden = (grad * weight).addcmul_(normal, mean, value=-1).mul_(rstd)
    return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype)
