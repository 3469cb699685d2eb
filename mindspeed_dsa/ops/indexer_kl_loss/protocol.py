"""Call objects of the indexer loss's sparse and dense form, and the protocol of its backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.ops.backend import Backend, Call, ShapeClass
from mindspeed_dsa.ops.checks import check_float, check_heads, check_shape, check_weights, require
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall
from mindspeed_dsa.ops.row_ranges import Ranges, RowForm
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall


@dataclass(frozen=True)
class SparseCall(Call):
    """Arguments of the loss over selected keys; their shapes have been checked.

    Attributes:
        index: query, key and weights of the indexer.
        attention: main attention over the same keys, with rotary parts concatenated or separate.
        lse: ``[batch, query_length, heads]`` log-sum-exp of that attention, or None.
        row_mask: ``[batch, query_length]`` bool, True for queries that count, or None.
        tp_group: tensor-parallel process group whose ranks hold the other heads.
    """

    index: IndexerCall
    attention: AttentionCall
    lse: Tensor | None
    row_mask: Tensor | None
    tp_group: dist.ProcessGroup | None


@dataclass(frozen=True)
class DenseCall(Call):
    """Arguments of the loss over all visible keys; their shapes have been checked.

    Attributes:
        index: query, key and weights of the indexer.
        query: ``[batch, query_length, heads, dim]``, this rank's heads.
        key: ``[batch, key_length, dim]``, or ``[batch, key_length, heads, dim]``.
        softmax_scale: factor of the main attention's scores.
        ranges: ranges of the keys that each query sees.
        row_weights: ``[batch, query_length]`` factors of the queries' divergences in the loss.
        tp_group: tensor-parallel process group whose ranks hold the other heads.
        sink: ``[heads]`` logits of the main attention, see :class:`AttentionCall`, or None.
        plan: result of the backend's ``plan_dense``.
    """

    index: IndexerCall
    query: Tensor
    key: Tensor
    softmax_scale: float
    ranges: Ranges
    row_weights: Tensor
    tp_group: dist.ProcessGroup | None = None
    sink: Tensor | None = None
    plan: Any = None


class _Loss(Backend, Protocol):
    def attention_sum(self, call: AttentionCall, lse: Tensor | None, /) -> Tensor:
        """Return the main attention over the selected keys, summed over this rank's heads.

        The rotary parts of the call's query and key are concatenated.
        """

    def plan_dense(self, call: DenseCall, row_mask: Tensor | None, /) -> Any:
        """Return the call's plan, or why it is declined: see :func:`mindspeed_dsa.ops.backend.plan`."""


class _AutogradDense(Protocol):
    def dense_loss(self, call: DenseCall, /) -> Tensor:
        """Return the dense loss, differentiable with respect to the indexer's three inputs."""


class _SparseGradient(Protocol):
    def divergence_and_gradient(
        self,
        topk_scores: Tensor,
        attention_sum: Tensor,
        valid: Tensor,
        row_weights: Tensor,
        with_gradient: bool,
        /,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sparse loss and its gradient with respect to ``topk_scores``."""


class AutogradLoss(_Loss, _AutogradDense, Protocol):
    """Backend without its own backward: autograd differentiates its losses."""

    KIND: Literal["autograd"]

    def divergence(
        self, topk_scores: Tensor, attention_sum: Tensor, valid: Tensor, row_weights: Tensor, /
    ) -> Tensor:
        """Return the sparse loss, differentiable with respect to ``topk_scores``."""


class GradientLoss(_Loss, _SparseGradient, Protocol):
    """Backend that computes the gradients together with the sparse or dense loss."""

    KIND: Literal["gradients"]

    def dense_loss_and_gradients(
        self, call: DenseCall, with_gradients: bool, /
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """Return the dense loss and its gradients with respect to the indexer's three inputs."""


class FusedLoss(_Loss, _AutogradDense, _SparseGradient, Protocol):
    """Backend with a fused operator for target, sparse loss and gradients, which takes only some calls."""

    KIND: Literal["fused"]

    def plan_fused(self, call: SparseCall, form: RowForm | None, /) -> Any:
        """Return the attention's ``plan``, or a sentence that says why the operator cannot take the call."""

    def fused_loss(self, call: SparseCall, row_weight: Tensor, /) -> Tensor:
        """Return the sparse loss, differentiable with respect to the indexer's three inputs."""


Loss = AutogradLoss | GradientLoss | FusedLoss


OPERATOR = "indexer_kl_loss"


def check_inputs(
    index_query: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    query: Tensor,
    key: Tensor,
    may_have_heads: bool,
) -> tuple[int, int]:
    """Check the inputs of the sparse or dense loss; ``key`` may have a head axis if ``may_have_heads``.

    Returns:
        ``(batch, query_length)``.
    """
    check_shape(OPERATOR, "query", query, (None,) * 4, "[batch, query_length, heads, dim]")
    check_heads(OPERATOR, "query", query)
    batch, query_length, heads, dim = query.shape
    tail = (heads, dim) if may_have_heads and key.dim() == 4 else (dim,)
    check_shape(
        OPERATOR, "key", key, (batch, None, *tail), f"[{batch}, key_length, {', '.join(map(str, tail))}]"
    )
    check_shape(
        OPERATOR,
        "index_query",
        index_query,
        (batch, query_length, None, None),
        f"[{batch}, {query_length}, index_heads, index_dim]",
    )
    check_heads(OPERATOR, "index_query", index_query)
    index_heads, index_dim = index_query.shape[2:]
    check_shape(
        OPERATOR, "index_key", index_key, (batch, None, index_dim), f"[{batch}, key_length, {index_dim}]"
    )
    require(
        index_key.shape[1] == key.shape[1],
        OPERATOR,
        f"index_key has {index_key.shape[1]} keys and key has {key.shape[1]}; both list the same positions",
    )
    check_shape(
        OPERATOR,
        "index_weights",
        index_weights,
        (batch, query_length, index_heads),
        f"[{batch}, {query_length}, {index_heads}]",
    )
    check_float(OPERATOR, query=query, key=key)
    check_float(OPERATOR, index_query=index_query, index_key=index_key)
    check_weights(OPERATOR, "index_weights", index_weights, index_query)
    require(
        index_query.device == query.device,
        OPERATOR,
        f"index_query ({index_query.device}) and query ({query.device}) must be on one device",
    )
    return batch, query_length


def check_supplied(
    topk_indices: Tensor, heads: int, per_head: Tensor | None, **per_entry: Tensor | None
) -> None:
    """Check ``lse`` (``per_head``), and tensors with one number per entry of ``topk_indices``, if given."""
    batch, query_length, topk = topk_indices.shape
    shapes = [("lse", per_head, (batch, query_length, heads))]
    shapes += [(name, tensor, (batch, query_length, topk)) for name, tensor in per_entry.items()]
    for name, tensor, shape in shapes:
        if tensor is not None:
            check_shape(OPERATOR, name, tensor, shape, str(list(shape)))
            device = topk_indices.device
            require(
                tensor.is_floating_point() and tensor.device == device,
                OPERATOR,
                f"{name} must be floating point on {device}, got {tensor.dtype} on {tensor.device}",
            )


def row_weights_of(rows: tuple[int, int], row_mask: Tensor | None, reduction: str, like: Tensor) -> Tensor:
    """Return the factor of each query's divergence in the loss, ``[batch, query_length]``."""
    require(reduction in ("mean", "sum"), OPERATOR, f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if row_mask is None:
        weights = like.new_ones(rows)  # [batch, query_length]
    else:
        require(
            row_mask.shape == rows and row_mask.dtype == torch.bool,
            OPERATOR,
            f"row_mask must be bool {list(rows)}, got {row_mask.dtype} {list(row_mask.shape)}",
        )
        weights = row_mask.to(dtype=like.dtype, device=like.device)
    # Without queries that count the loss is zero, not 0/0.
    return weights / weights.sum().clamp_min(1) if reduction == "mean" else weights


def shape_class(index_query: Tensor, query: Tensor, topk: int, key_heads: int = 1) -> ShapeClass:
    """Return the shape class for selecting a backend; ``topk`` is 0 for the dense loss."""
    sizes = (
        ("heads", query.shape[2]),
        ("dim", query.shape[3]),
        ("key_heads", key_heads),
        ("index_heads", index_query.shape[2]),
        ("index_dim", index_query.shape[3]),
        ("topk", topk),
    )
    return ShapeClass.of(query, *sizes)


def shape_of_entries(topk_scores: Tensor) -> ShapeClass:
    """Return the shape class of a call without query and key: all sizes except ``topk`` are 1."""
    names = ("heads", "dim", "key_heads", "index_heads", "index_dim")
    return ShapeClass.of(topk_scores, *((name, 1) for name in names), ("topk", topk_scores.shape[2]))


def over_ranks(attention_sum: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Sum ``attention_sum``, probabilities summed over one rank's heads, over ranks; return a new tensor."""
    attention_sum = attention_sum.detach()
    if tp_group is not None:
        attention_sum = attention_sum.clone()
        dist.all_reduce(attention_sum, group=tp_group)
    return attention_sum
