"""Backends of SwiGLU: autograd, a version with few operations for CPUs, Liger-Kernel, and torch_npu."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops import liger
from mindspeed_dsa.ops.backend import Backend, ShapeClass
from mindspeed_dsa.ops.npu.device import npu_op, unavailable

_SWIGLU = "npu_swiglu"


class SwiGLU(Backend):
    """Backend of SwiGLU."""

    @abstractmethod
    def swiglu(self, gate_up: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        """Return ``silu(gate) * up * scale``, ``[..., ffn]``, differentiable."""


class Reference(SwiGLU):
    """Backend that computes the SwiGLU formula in plain PyTorch, with backward by autograd."""

    def swiglu(self, gate_up: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        gate, up = (gate_up if bias is None else gate_up + bias).chunk(2, -1)  # [..., ffn] each
        output = F.silu(gate) * up
        return output if scale is None else (output * scale).to(output.dtype)


class GradientSwiGLU(SwiGLU):
    """Backend with its own backward; its callers apply bias and scale."""

    def swiglu(self, gate_up: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        output: Tensor = _SwiGLU.apply(self, gate_up, bias, scale)
        return output

    @abstractmethod
    def forward(self, gate_up: Tensor) -> Tensor:
        """Return ``silu(gate) * up``, ``[..., ffn]``."""

    @abstractmethod
    def backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """Return the gradient of ``gate_up``, in its dtype; ``grad`` may have a wider dtype."""

    def backward_of_scaled(
        self, grad: Tensor, gate_up: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return the gradients of ``gate_up`` and ``scale`` in one pass; all tensors are fp32, or all fp64.

        Returns None if the backend has no fused version.
        """
        return None


class Cpu(GradientSwiGLU):
    """Backend in PyTorch; backward computes terms that the gate and up gradients share only once."""

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)  # [..., ffn] each
        return F.silu(gate).mul_(up)

    def backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)  # [..., ffn] each
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return torch.cat((grad_gate, F.silu(gate) * grad), -1).to(gate_up.dtype)  # [..., 2 * ffn]

    def backward_of_scaled(self, grad: Tensor, gate_up: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = gate_up.chunk(2, -1)  # [..., ffn] each
        grad_gate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)  # views, [..., ffn] each
        # For y = silu(gate) * up * scale: the scale's gradient is sum(grad * up * silu(gate)).
        activated, grad_activated = F.silu(gate), grad * up
        torch.ops.aten.silu_backward.grad_input(grad_activated, gate, grad_input=grad_gate)
        torch.mul(activated, grad, out=grad_up)
        return grad_gate_up.mul_(scale), grad_activated.mul_(activated).sum(-1, keepdim=True)


class Cuda(GradientSwiGLU):
    """Backend that calls Liger-Kernel's kernels for concatenated ``[gate, up]`` rows."""

    def unsupported(self, shape: ShapeClass) -> str | None:
        return liger.unavailable(shape, shape["ffn"])

    def forward(self, gate_up: Tensor) -> Tensor:
        output: Tensor = liger.kernels("swiglu").swiglu_fused_gate_up_forward(gate_up.contiguous())[1]
        return output

    def backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        kernel = liger.kernels("swiglu").swiglu_fused_gate_up_backward
        gradient: Tensor = kernel(gate_up.contiguous(), grad.contiguous())
        return gradient.view(gate_up.shape)


class Npu(GradientSwiGLU):
    """Backend that calls torch_npu's operators for output and gradient."""

    def unsupported(self, shape: ShapeClass) -> str | None:
        if shape.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{_SWIGLU} takes fp32, bf16 and fp16"
        return unavailable(shape.device, _SWIGLU, f"{_SWIGLU}_backward")

    def forward(self, gate_up: Tensor) -> Tensor:
        output: Tensor = npu_op(_SWIGLU)(gate_up, dim=-1)
        return output

    def backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        # The operator requires the incoming gradient in the dtype of gate_up.
        gradient: Tensor = npu_op(f"{_SWIGLU}_backward")(grad.to(gate_up.dtype), gate_up, dim=-1)
        return gradient


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, implementation: GradientSwiGLU, gate_up: Tensor, bias: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        ctx.implementation = implementation
        ctx.save_for_backward(gate_up, bias, scale)
        output = implementation.forward(gate_up if bias is None else gate_up + bias)
        return output if scale is None else (output * scale).to(output.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gate_up, bias, scale = ctx.saved_tensors
        # The common case of a router's probabilities: both gradients share silu(gate) and grad * up.
        learned = bias is None and scale is not None and ctx.needs_input_grad[3]
        if learned and _is_wide(grad, gate_up, scale):
            gradients = ctx.implementation.backward_of_scaled(grad, gate_up, scale)
            if gradients is not None:
                return None, gradients[0], None, gradients[1]
        biased = gate_up if bias is None else gate_up + bias
        grad_bias = grad_scale = None
        if scale is not None and ctx.needs_input_grad[3]:
            # Factors may have a wider dtype than the rows; their gradient is computed in it.
            products = ctx.implementation.forward(biased) * grad.to(scale.dtype)
            grad_scale = products.sum(-1, keepdim=True).to(scale.dtype)
        grad_biased = ctx.implementation.backward(grad if scale is None else grad * scale, biased)
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_biased.sum_to_size(bias.shape)
        return None, grad_biased, grad_bias, grad_scale


def _is_wide(*tensors: Tensor) -> bool:
    """Return whether all tensors are fp32, or all fp64, so that products need no conversion."""
    return {tensor.dtype for tensor in tensors} in ({torch.float32}, {torch.float64})
