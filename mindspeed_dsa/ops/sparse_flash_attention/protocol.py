"""Call object of sparse flash attention, and the protocol of its backends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import Backend, Call
from mindspeed_dsa.ops.row_ranges import RowForm

_SINK_NUMBERS = 16 << 20


@dataclass(frozen=True)
class AttentionCall(Call):
    """Arguments of attention to selected keys; their shapes have been checked.

    Attributes:
        query: ``[batch, query_length, heads, dim]``, any strides; without its rotary part if ``query_rope``
            is set.
        key_value: ``[batch, key_length, dim]``, in the dtype of the query, one head shared by all query
            heads; without its rotary part if ``key_rope`` is set.
        topk_indices: ``[batch, query_length, topk]`` int32 or int64; entries outside ``[0, key_length)`` name
            no key.
        softmax_scale: factor of the scores.
        value_dim: size of the leading part of ``key_value`` that is the value.
        query_rope: rotary part of the query, ``[batch, query_length, heads, rope]``, if it is a separate
            tensor. Only backends with ``TAKES_PARTS`` get it.
        key_rope: rotary part of the key, ``[batch, key_length, rope]``, if it is a separate tensor. Set only
            together with ``query_rope``.
        sink: ``[heads]`` logit of each head that takes part in the softmax beside the scores and has no
            value, in the dtype that the scores are computed in; or None.
        plan: result of the backend's ``plan_call``.
    """

    query: Tensor
    key_value: Tensor
    topk_indices: Tensor
    softmax_scale: float
    value_dim: int
    query_rope: Tensor | None = None
    key_rope: Tensor | None = None
    sink: Tensor | None = None
    plan: Any = None

    def whole(self) -> AttentionCall:
        """Return the call with the rotary parts concatenated to ``query`` and ``key_value``."""
        if self.query_rope is None:
            return self
        # query: [batch, query_length, heads, dim + rope]
        query, key_value = torch.cat([self.query, self.query_rope], dim=-1), self.key_value
        if self.key_rope is not None:
            key_value = torch.cat([key_value, self.key_rope], dim=-1)  # [batch, key_length, dim + rope]
        return replace(self, query=query, key_value=key_value, query_rope=None, key_rope=None)


def softmax(scores: Tensor, sink: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return the softmax over the last axis, multiplied with the share that a sink leaves to the keys.

    Args:
        scores: ``[..., keys]``.
        sink: logits whose shape broadcasts against ``[...]``, or None.
        out: tensor for the result; may be ``scores``.
    """
    if sink is None:
        return torch.softmax(scores, dim=-1, out=out)
    top = scores.amax(dim=-1)
    probabilities = torch.softmax(scores, dim=-1, out=out)
    # The most probable key has probability exp(0) / sum.
    share = share_of_keys(top - probabilities.amax(dim=-1).log_(), sink)
    return probabilities.mul_(share[..., None])


def share_of_keys(lse: Tensor, sink: Tensor) -> Tensor:
    """Return the probability that a sink leaves to the keys, given the log-sum-exp of the keys alone."""
    # Rows without a key: -inf - -inf would be NaN.
    return torch.sigmoid(lse - sink).masked_fill_(lse == -torch.inf, 0)


def add_sink(sink: Tensor | None, lse: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the log-sum-exp of keys and sink from the keys' ``lse``, ``[batch, query_length, heads]``.

    ``out``, ``[batch, query_length, heads, value_dim]`` of the keys alone, is scaled in place. So kernels
    need no sink: in the backward they compute ``exp(score - lse)`` and ``dO . O`` from these two results.
    """
    if sink is None:
        return lse
    if out is not None:
        out.mul_(share_of_keys(lse, sink)[..., None])
    return torch.logaddexp(lse, sink)


def with_sink_alone(lse: Tensor, sink: Tensor | None) -> Tensor:
    """Return ``lse``, set to the sink in rows where the sink alone counts.

    These rows name no key, or have scores so low that the probabilities of :func:`softmax` are all 0.
    """
    return lse if sink is None else torch.where(lse.isinf(), sink, lse)


def sink_gradient(sink: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return ``-sum_t p_sink[t] * (dO[t] . out[t])``, ``[heads]``, given the ``lse`` with the sink."""
    gradient = torch.zeros_like(sink)
    batch, query_length, heads, value_dim = out.shape
    # Few rows at a time: the products are in fp32.
    rows = max(1, _SINK_NUMBERS // (heads * value_dim))
    for b in range(batch):
        for first in range(0, query_length, rows):
            place = (b, slice(first, first + rows))
            product = grad_out[place].to(sink.dtype) * out[place]
            # A row without keys has an output of 0, and no gradient even if grad_out is NaN there.
            delta = product.masked_fill_(out[place] == 0, 0).sum(dim=-1)  # [rows, heads]
            # -inf - -inf would be NaN.
            probability = (sink - lse[place]).exp().masked_fill_(lse[place] == -torch.inf, 0)
            gradient -= (probability * delta).sum(dim=0)
    return gradient


class _Attention(Backend, Protocol):
    def plan_call(self, call: AttentionCall, form: RowForm | None, /) -> Any:
        """Return the call's plan, or why it is declined: see :func:`mindspeed_dsa.ops.backend.plan`.

        ``form`` describes the rows' visible keys if the host knows them, else it is None.
        """


class AutogradAttention(_Attention, Protocol):
    """Backend without its own backward: autograd differentiates its forward."""

    KIND: Literal["autograd"]

    def sparse_flash_attention(
        self, call: AttentionCall, with_sum: bool, /
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the three fields of ``SparseAttentionOutput``."""


class GradientAttention(_Attention, Protocol):
    """Backend with its own backward."""

    KIND: Literal["gradients"]
    TAKES_PARTS: bool

    def forward(self, call: AttentionCall, with_sum: bool, /) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the three fields of ``SparseAttentionOutput``."""

    def backward(
        self, call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, with_sum: bool, /
    ) -> tuple[Any, Any, Tensor | None]:
        """Return the gradients of query and key_value, and if requested the probabilities summed over heads.

        The query's gradient is a pair if the call has ``query_rope``, and the key's is one if it has
        ``key_rope``. The gradient of ``key_value``, a sum over queries, may have a wider dtype than
        ``key_value``.
        """


Attention = AutogradAttention | GradientAttention
