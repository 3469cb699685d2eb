"""What a backend of this operator has; mypy checks the modules against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from mindspeed_dsa.ops.backend import Backend


class _Norm(Backend, Protocol):
    def plan(self, hidden: Tensor, weight: Tensor, /) -> Any:
        """See :func:`mindspeed_dsa.ops.backend.plan`."""


class AutogradNorm(_Norm, Protocol):
    """A function with a gradient of its own."""

    KIND: Literal["autograd"]

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """``[..., n]``."""


class GradientNorm(_Norm, Protocol):
    """A function beside which there is the one for its gradients."""

    KIND: Literal["gradients"]

    def forward(self, hidden: Tensor, weight: Tensor, eps: float, /) -> tuple[Tensor, Tensor]:
        """``[..., n]``, and ``[..., 1]`` what each row was multiplied by, in fp32 or fp64."""

    def backward(
        self, grad: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor, /
    ) -> tuple[Tensor, Tensor]:
        """Gradients of ``hidden`` and of ``weight``."""


Norm = AutogradNorm | GradientNorm

if TYPE_CHECKING:
    from mindspeed_dsa.ops.rms_norm import cpu, cuda, npu, reference

    BACKENDS: tuple[Norm, ...] = (reference, cpu, cuda, npu)
