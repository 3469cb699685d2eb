"""Backends of RMSNorm: PyTorch's function, a version with few operations for CPUs, Liger, and torch_npu."""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops import liger
from mindspeed_dsa.ops.backend import Backend, ShapeClass
from mindspeed_dsa.ops.npu.device import npu_op, product, unavailable
from mindspeed_dsa.ops.precision import normalize
from mindspeed_dsa.platforms.npu_operators import PRODUCTS

_NORM = "npu_rms_norm"


class Norm(Backend):
    """Backend of RMSNorm; the defaults here declare no limits."""

    def plan(self, hidden: Tensor, weight: Tensor) -> str | None:
        """Return why the backend cannot take a call, or None: see :func:`mindspeed_dsa.ops.backend.plan`."""
        return None

    @abstractmethod
    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the normalized ``[..., n]``, differentiable."""


class Reference(Norm):
    """Backend that calls PyTorch's RMSNorm and leaves backward to autograd."""

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        return normalize(F.rms_norm, hidden, weight, eps)


class GradientNorm(Norm):
    """Backend with its own backward."""

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        output: Tensor = _RMSNorm.apply(self, hidden, weight, eps)
        return output

    @abstractmethod
    def forward(self, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the output ``[..., n]``, and ``rstd`` of each row, ``[..., 1]``, in fp32 or fp64."""

    @abstractmethod
    def backward(self, grad: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of ``hidden`` and of ``weight``."""


class Cpu(GradientNorm):
    """Backend with few PyTorch operations; forward reads each row once to compute its norm."""

    def forward(self, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        length = torch.linalg.vector_norm(hidden, 2, -1, True, dtype=wide)  # [..., 1]
        # (eps + length ** 2 / n) ** -0.5, [..., 1]
        rstd = torch.addcmul(_constant(eps, wide), length, length, value=1 / hidden.shape[-1]).rsqrt_()
        return (hidden * rstd).mul_(weight).to(hidden.dtype), rstd

    def backward(self, grad: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        grad = grad.to(rstd.dtype)
        normal = hidden * rstd
        product = grad * normal
        rows = tuple(range(hidden.dim() - 1))
        grad_weight = product.sum(rows) if rows else product  # [n]
        mean = (product * weight).mean(-1, keepdim=True)  # [..., 1]
        # dX = r (g - n mean(g n)) with g = dY w, n = x r and r = rstd
        grad_hidden = (grad * weight).addcmul_(normal, mean, value=-1).mul_(rstd)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype)


@cache
def _constant(eps: float, dtype: torch.dtype) -> Tensor:
    """Return ``eps`` as a tensor, cached because a model has few distinct values."""
    with torch.inference_mode(False):
        return torch.tensor(eps, dtype=dtype, device="cpu")


class Cuda(Norm):
    """Backend that calls Liger-Kernel's autograd function."""

    def unsupported(self, shape: ShapeClass) -> str | None:
        return liger.unavailable(shape, shape["hidden"])

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        function = liger.kernels("rms_norm").LigerRMSNormFunction
        # "gemma" computes everything in fp32, as PyTorch does. False: not in place, others may read the
        # gradient.
        output: Tensor = function.apply(hidden, weight, eps, 0.0, "gemma", False)
        return output


class Npu(GradientNorm):
    """Backend that calls torch_npu's operators for output and gradients."""

    def unsupported(self, shape: ShapeClass) -> str | None:
        if shape.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{_NORM} takes fp32, bf16 and fp16"
        return unavailable(shape.device, _NORM, f"{_NORM}_backward")

    def plan(self, hidden: Tensor, weight: Tensor) -> str | None:
        if weight.dtype not in (hidden.dtype, torch.float32):
            return (
                f"{_NORM} takes a weight of its input's dtype or in fp32, not {weight.dtype} "
                f"with {hidden.dtype}"
            )
        # fp32 weights occur with MindSpeed-LLM's --init-norm-weight-in-fp32.
        if weight.dtype != hidden.dtype and not product().norm_weight_in_fp32:
            where = " and ".join(known.name for known in PRODUCTS if known.norm_weight_in_fp32)
            return (
                f"{_NORM} takes a weight in fp32 beside {hidden.dtype} on {where} only; this is "
                f"{product().name}"
            )
        if not 2 <= hidden.dim() <= 8:
            return f"{_NORM} takes 2 to 8 axes, not {hidden.dim()}"
        return None

    def forward(self, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        output, rstd = npu_op(_NORM)(hidden, weight, epsilon=eps)
        return output.to(hidden.dtype), rstd  # the manual does not specify the dtype for a wider weight

    def backward(self, grad: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        grad_hidden, grad_weight = npu_op(f"{_NORM}_backward")(grad, hidden, weight, rstd)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, implementation: GradientNorm, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, rstd = implementation.forward(hidden, weight, eps)
        ctx.implementation = implementation
        ctx.save_for_backward(hidden, weight, rstd)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *ctx.implementation.backward(grad, *ctx.saved_tensors), None
