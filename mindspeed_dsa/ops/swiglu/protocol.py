"""What a backend of this operator has; mypy checks the modules against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from mindspeed_dsa.ops.backend import Backend


class AutogradSwiGLU(Backend, Protocol):
    """A function that autograd differentiates."""

    KIND: Literal["autograd"]

    def swiglu(self, gate_up: Tensor, bias: Tensor | None, scale: Tensor | None, /) -> Tensor:
        """``[..., ffn]``."""


class GradientSwiGLU(Backend, Protocol):
    """A function beside which there is the one for its gradient; bias and scale are added around it.

    A backend can have ``backward_of_scaled(grad, gate_up, scale)`` besides, for tensors of fp32 or of fp64,
    which returns the gradients of ``gate_up`` and of ``scale``.
    """

    KIND: Literal["gradients"]

    def forward(self, gate_up: Tensor, /) -> Tensor:
        """``[..., ffn]``."""

    def backward(self, grad: Tensor, gate_up: Tensor, /) -> Tensor:
        """Gradient of ``gate_up``, in its dtype; the one that arrives may have more bits."""


SwiGLU = AutogradSwiGLU | GradientSwiGLU

if TYPE_CHECKING:
    from mindspeed_dsa.ops.swiglu import cpu, cuda, npu, reference

    BACKENDS: tuple[SwiGLU, ...] = (reference, cpu, cuda, npu)
