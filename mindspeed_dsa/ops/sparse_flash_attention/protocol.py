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
        key_value: ``[batch, key_length, dim]``, in the dtype of the query, one head for all; or the part
            before ``key_rope``.
        topk_indices: ``[batch, query_length, topk]`` int32 or int64; entries outside of the keys are none.
        softmax_scale: factor of the scores.
        value_dim: leading part of ``key_value`` that is the value.
        query_rope: rotary part of the query where it is apart, which backends get that say ``TAKES_PARTS``.
        key_rope: rotary part of the key where it is apart, ``[batch, key_length, rope]``; beside
            ``query_rope`` only.
        plan: findings of the backend's ``plan_call``.
    """

    query: Tensor
    key_value: Tensor
    topk_indices: Tensor
    softmax_scale: float
    value_dim: int
    query_rope: Tensor | None = None
    key_rope: Tensor | None = None
    plan: Any = None

    def whole(self) -> AttentionCall:
        """Return the call with its query and its key in one piece each."""
        if self.query_rope is None:
            return self
        query, key_value = torch.cat([self.query, self.query_rope], dim=-1), self.key_value
        if self.key_rope is not None:
            key_value = torch.cat([key_value, self.key_rope], dim=-1)
        return replace(self, query=query, key_value=key_value, query_rope=None, key_rope=None)


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
    ) -> tuple[Any, Any, Tensor | None]:
        """Return gradients of query and key_value, and if asked for the probabilities summed over heads.

        The query's gradient is a pair where its parts are apart, and so is the key's. The gradient of
        ``key_value``, a sum over rows, may have a wider dtype than ``key_value``.
        """


Attention = AutogradAttention | GradientAttention
