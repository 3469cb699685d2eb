"""SwiGLU: ``silu(gate) * up`` of rows that hold both halves, with a bias and a factor for each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops.backend import ShapeClass, choose, count_call, unless_empty
from mindspeed_dsa.ops.checks import require
from mindspeed_dsa.ops.swiglu import reference
from mindspeed_dsa.ops.swiglu.protocol import SwiGLU

OPERATOR = "swiglu"


def swiglu(
    gate_up: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """``silu(gate) * up * scale``, where ``[gate, up] = gate_up + bias``.

    Backward keeps the arguments and nothing else.

    Args:
        gate_up: ``[..., 2 * ffn]``; fp32, bf16, fp16 or fp64.
        bias: ``[2 * ffn]``, or None.
        scale: ``[..., 1]`` of any floating dtype, such as a router's probabilities, or None.
        backend: see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        ``[..., ffn]`` in the dtype of ``gate_up``.

    Raises:
        ValueError: a shape does not fit.
        BackendUnavailable: the backend asked for cannot take the call.
    """
    if torch.compiler.is_compiling():  # which fuses the operations by itself
        return reference.swiglu(gate_up, bias, scale)
    width = gate_up.shape[-1]
    require(
        width % 2 == 0,
        OPERATOR,
        lambda: f"gate_up must have an even last size, got {list(gate_up.shape)}",
    )
    require(
        bias is None or bias.shape == (width,),
        OPERATOR,
        lambda: f"bias must be [{width}], got {None if bias is None else list(bias.shape)}",
    )
    require(
        scale is None or scale.shape == (*gate_up.shape[:-1], 1),
        OPERATOR,
        lambda: (
            f"scale must be {[*gate_up.shape[:-1], 1]}, got {None if scale is None else list(scale.shape)}"
        ),
    )
    chosen: SwiGLU = choose(OPERATOR, backend, ShapeClass.of(gate_up, ("ffn", width // 2)))
    implementation = unless_empty(OPERATOR, chosen, gate_up)
    count_call(OPERATOR, implementation)
    if implementation.KIND == "autograd":
        return implementation.swiglu(gate_up, bias, scale)
    return _SwiGLU.apply(implementation, gate_up, bias, scale)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, implementation: Any, gate_up: Tensor, bias: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        ctx.implementation = implementation
        ctx.save_for_backward(gate_up, bias, scale)
        output = implementation.forward(gate_up if bias is None else gate_up + bias)
        return output if scale is None else (output * scale).to(output.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gate_up, bias, scale = ctx.saved_tensors
        together = getattr(ctx.implementation, "backward_of_scaled", None)
        learned = bias is None and scale is not None and ctx.needs_input_grad[3]
        if together is not None and learned and _is_wide(grad, gate_up, scale):
            grad_gate_up, grad_scale = together(grad, gate_up, scale)
            return None, grad_gate_up, None, grad_scale
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
    """Whether all are of one dtype whose products need not be formed in another one."""
    return {each.dtype for each in tensors} in ({torch.float32}, {torch.float64})
