"""Call of this operator, and protocol of its backends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import Backend, Call
from mindspeed_dsa.ops.row_ranges import RowForm


@dataclass(frozen=True)
class AttentionCall(Call):
    """Arguments of attention to selected keys, of checked shapes.

    Attributes:
        query: ``[batch, query_length, heads, dim]``, any strides; or the part before ``query_rope``.
        key_value: ``[batch, key_length, dim]``, in the dtype of the query; one head for all.
        topk_indices: ``[batch, query_length, topk]`` int32 or int64; entries outside of the keys are none.
        softmax_scale: factor of the scores.
        value_dim: leading part of ``key_value`` that is the value.
        query_rope: rotary part of the query where it is apart, which backends get that say ``TAKES_PARTS``.
        plan: findings of the backend's ``plan_call``.
    """

    query: Tensor
    key_value: Tensor
    topk_indices: Tensor
    softmax_scale: float
    value_dim: int
    query_rope: Tensor | None = None
    plan: Any = None

    def whole(self) -> AttentionCall:
        """Return the call with its query in one piece."""
        if self.query_rope is None:
            return self
        return replace(self, query=torch.cat([self.query, self.query_rope], dim=-1), query_rope=None)


class _Attention(Backend, Protocol):
    def plan_call(self, call: AttentionCall, form: RowForm | None, /) -> Any:
        """Return the call's ``plan``, or why it takes none: see :func:`mindspeed_dsa.ops.backend.plan`."""


class AutogradAttention(_Attention, Protocol):
    """A function that autograd differentiates."""

    KIND: Literal["autograd"]

    def sparse_flash_attention(
        self, call: AttentionCall, with_sum: bool, /
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the three parts of ``SparseAttentionOutput``."""


class GradientAttention(_Attention, Protocol):
    """Forward and backward."""

    KIND: Literal["gradients"]
    TAKES_PARTS: bool

    def forward(self, call: AttentionCall, with_sum: bool, /) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the three parts of ``SparseAttentionOutput``."""

    def backward(
        self, call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, with_sum: bool, /
    ) -> tuple[Any, Tensor, Tensor | None]:
        """Return gradients of query and key_value, and if asked for the probabilities summed over heads.

        That of the query is a pair where its parts are apart. That of ``key_value``, a sum over rows, may be
        wider than that is.
        """


Attention = AutogradAttention | GradientAttention
