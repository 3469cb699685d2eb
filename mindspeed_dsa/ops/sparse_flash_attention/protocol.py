"""What a backend of this operator has; mypy checks the modules against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from mindspeed_dsa.ops.backend import Backend
from mindspeed_dsa.ops.row_ranges import RowForm


class _Attention(Backend, Protocol):
    def plan_call(self, topk_indices: Tensor, key_length: int, form: RowForm | None, /) -> Any:
        """See :func:`mindspeed_dsa.ops.backend.plan`; what it finds are the other functions' ``found``."""


class AutogradAttention(_Attention, Protocol):
    """A function that autograd differentiates."""

    KIND: Literal["autograd"]

    def sparse_flash_attention(
        self,
        query: Tensor,
        key_value: Tensor,
        topk_indices: Tensor,
        softmax_scale: float,
        value_dim: int,
        return_attention_sum: bool,
        /,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The three parts of ``SparseAttentionOutput``."""


class GradientAttention(_Attention, Protocol):
    """Forward and backward.

    Where ``TAKES_PARTS``, a query may come as its latent and its rotary part, and its gradient goes so too.
    """

    KIND: Literal["gradients"]
    TAKES_PARTS: bool

    def forward(
        self,
        query: Any,
        key_value: Tensor,
        topk_indices: Tensor,
        softmax_scale: float,
        value_dim: int,
        return_attention_sum: bool,
        /,
        *found: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The three parts of ``SparseAttentionOutput``."""

    def backward(
        self,
        grad_out: Tensor,
        query: Any,
        key_value: Tensor,
        topk_indices: Tensor,
        out: Tensor,
        lse: Tensor,
        softmax_scale: float,
        return_attention_sum: bool,
        /,
        *found: Any,
        **options: Any,
    ) -> tuple[Any, Tensor, Tensor | None]:
        """Gradients of ``query`` and ``key_value``, and if asked for the probabilities summed over heads.

        That of ``key_value``, a sum over rows, may be wider than that is.
        """


Attention = AutogradAttention | GradientAttention

if TYPE_CHECKING:
    from mindspeed_dsa.ops.sparse_flash_attention import chunked, cpu, npu, reference, triton

    BACKENDS: tuple[Attention, ...] = (reference, chunked, cpu, triton, npu)
