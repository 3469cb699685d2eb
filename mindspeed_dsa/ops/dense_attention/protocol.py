"""What a backend of this operator has; mypy checks the modules against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from mindspeed_dsa.ops.backend import Backend


class DenseAttention(Backend, Protocol):
    """Two functions, of tensors whose shapes were checked; all of them have entries, but in the reference."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, causal: bool, /
    ) -> tuple[Tensor, Tensor]:
        """``out`` and ``lse``."""

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        softmax_scale: float,
        causal: bool,
        /,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What these keys add to the gradients of query, key and value."""


if TYPE_CHECKING:
    from mindspeed_dsa.ops.dense_attention import cpu, cuda, npu, reference

    BACKENDS: tuple[DenseAttention, ...] = (reference, cpu, cuda, npu)
