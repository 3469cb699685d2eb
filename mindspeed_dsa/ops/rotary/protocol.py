"""What a backend of this operator has; mypy checks the modules against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from mindspeed_dsa.ops.backend import Backend
from mindspeed_dsa.ops.rotary.layouts import Layout


class Rotator(Backend, Protocol):
    """Functions of tensors whose last axis is what is rotated."""

    def plan(self, like: Tensor, angles: Tensor, scale: float, layout: Layout, /) -> Any:
        """See :func:`mindspeed_dsa.ops.backend.plan`."""

    def tables(self, cos: Tensor, sin: Tensor, layout: Layout, /) -> tuple[Tensor, Tensor, Tensor]:
        """Cosines, and what forward and backward take for sines."""

    def forward(self, tensor: Tensor, cos: Tensor, sin: Tensor, layout: Layout, /) -> Tensor:
        """The rotated tensor, which shares no memory with the given one."""

    def backward(self, grad: Tensor, cos: Tensor, backward_sin: Tensor, layout: Layout, /) -> Tensor:
        """The gradient of the tensor."""


if TYPE_CHECKING:
    from mindspeed_dsa.ops.rotary import cpu, cuda, npu, reference

    BACKENDS: tuple[Rotator, ...] = (reference, cpu, cuda, npu)
