"""Backends of SwiGLU: autograd's, few operations on CPUs, Liger-Kernel's on GPUs, torch_npu's."""

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
        """Return ``[..., ffn]``, differentiable."""


class Reference(SwiGLU):
    """The formula in PyTorch, by autograd."""

    def swiglu(self, gate_up: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        gate, up = (gate_up if bias is None else gate_up + bias).chunk(2, -1)
        output = F.silu(gate) * up
        return output if scale is None else (output * scale).to(output.dtype)


class GradientSwiGLU(SwiGLU):
    """Backend with a function for its gradient; bias and scale are added around both."""

    def swiglu(self, gate_up: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        output: Tensor = _SwiGLU.apply(self, gate_up, bias, scale)
        return output

    @abstractmethod
    def forward(self, gate_up: Tensor) -> Tensor:
        """Return ``[..., ffn]``."""

    @abstractmethod
    def backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """Return the gradient of ``gate_up``, in its dtype; the one that arrives may have more bits."""

    def backward_of_scaled(
        self, grad: Tensor, gate_up: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return the gradients of ``gate_up`` and of ``scale``, all of fp32 or of fp64.

        None where the two are computed one after the other.
        """
        return None


class Cpu(GradientSwiGLU):
    """PyTorch's operations, and what they share in backward computed once."""

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return torch.cat((grad_gate, F.silu(gate) * grad), -1).to(gate_up.dtype)

    def backward_of_scaled(self, grad: Tensor, gate_up: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = gate_up.chunk(2, -1)
        grad_gate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        activated, grad_activated = F.silu(gate), grad * up
        torch.ops.aten.silu_backward.grad_input(grad_activated, gate, grad_input=grad_gate)
        torch.mul(activated, grad, out=grad_up)
        return grad_gate_up.mul_(scale), grad_activated.mul_(activated).sum(-1, keepdim=True)


class Cuda(GradientSwiGLU):
    """Liger-Kernel's kernels for rows that hold both halves."""

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
    """torch_npu's operators."""

    def unsupported(self, shape: ShapeClass) -> str | None:
        if shape.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{_SWIGLU} takes fp32, bf16 and fp16"
        return unavailable(shape.device, _SWIGLU, f"{_SWIGLU}_backward")

    def forward(self, gate_up: Tensor) -> Tensor:
        output: Tensor = npu_op(_SWIGLU)(gate_up, dim=-1)
        return output

    def backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        # The operator wants the dtype of gate_up of the arriving gradient too.
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
        learned = bias is None and scale is not None and ctx.needs_input_grad[3]
        if learned and _is_wide(grad, gate_up, scale):
            gradients = ctx.implementation.backward_of_scaled(grad, gate_up, scale)
            if gradients is not None:
                return None, gradients[0], None, gradients[1]
        biased = gate_up if bias is None else gate_up + bias
        grad_bias = grad_scale = None
        if scale is not None and ctx.needs_input_grad[3]:
            # The factors are kept in more bits than the rows, and their gradient is formed in these.
            products = ctx.implementation.forward(biased) * grad.to(scale.dtype)
            grad_scale = products.sum(-1, keepdim=True).to(scale.dtype)
        grad_biased = ctx.implementation.backward(grad if scale is None else grad * scale, biased)
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_biased.sum_to_size(bias.shape)
        return None, grad_biased, grad_bias, grad_scale


def _is_wide(*tensors: Tensor) -> bool:
    """Return whether all are of one dtype whose products need not be formed in another one."""
    return {tensor.dtype for tensor in tensors} in ({torch.float32}, {torch.float64})
