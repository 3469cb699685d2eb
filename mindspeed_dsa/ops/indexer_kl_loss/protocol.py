"""Calls of this operator's two forms, and protocol of its backends, against which mypy checks the modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.ops.backend import Backend, Call
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall
from mindspeed_dsa.ops.row_ranges import Ranges, RowForm
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall


@dataclass(frozen=True)
class SparseCall(Call):
    """Arguments of the loss over selected keys, of checked shapes.

    Attributes:
        index: the indexer's query, key and weights.
        attention: the main attention over the same keys, its query in one piece or in parts.
        lse: ``[batch, query_length, heads]`` of that attention, or None.
        row_mask: ``[batch, query_length]`` bool, True for rows that count, or None.
        tp_group: tensor-parallel process group whose ranks hold the other heads.
    """

    index: IndexerCall
    attention: AttentionCall
    lse: Tensor | None
    row_mask: Tensor | None
    tp_group: dist.ProcessGroup | None


@dataclass(frozen=True)
class DenseCall(Call):
    """Arguments of the loss over all visible keys, of checked shapes.

    Attributes:
        index: the indexer's query, key and weights.
        query: ``[batch, query_length, heads, dim]``, this rank's heads.
        key: ``[batch, key_length, dim]``, or ``[batch, key_length, heads, dim]``.
        softmax_scale: factor of the main attention's scores.
        ranges: the keys that each row sees.
        row_weights: ``[batch, query_length]``, what each row's divergence is multiplied with.
        tp_group: tensor-parallel process group whose ranks hold the other heads.
        plan: findings of the backend's ``plan_dense``.
    """

    index: IndexerCall
    query: Tensor
    key: Tensor
    softmax_scale: float
    ranges: Ranges
    row_weights: Tensor
    tp_group: dist.ProcessGroup | None = None
    plan: Any = None


class _Loss(Backend, Protocol):
    def attention_sum(self, call: AttentionCall, lse: Tensor | None, /) -> Tensor:
        """Return main attention over the selected keys, summed over this rank's heads; of a whole query."""

    def plan_dense(self, call: DenseCall, row_mask: Tensor | None, /) -> Any:
        """Return the call's ``plan``, or why it takes none: see :func:`mindspeed_dsa.ops.backend.plan`."""


class _AutogradDense(Protocol):
    def dense_loss(self, call: DenseCall, /) -> Tensor:
        """Return the dense form, differentiable with respect to the indexer's three inputs."""


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
        """Return the sparse form's loss and its gradient with respect to ``topk_scores``."""


class AutogradLoss(_Loss, _AutogradDense, Protocol):
    """Both forms are differentiated by autograd."""

    KIND: Literal["autograd"]

    def divergence(
        self, topk_scores: Tensor, attention_sum: Tensor, valid: Tensor, row_weights: Tensor, /
    ) -> Tensor:
        """Return the sparse form's loss, differentiable with respect to ``topk_scores``."""


class GradientLoss(_Loss, _SparseGradient, Protocol):
    """Both forms return their gradients with the loss."""

    KIND: Literal["gradients"]

    def dense_loss_and_gradients(
        self, call: DenseCall, with_gradients: bool, /
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """Return the dense form's loss and its gradients with respect to the indexer's three inputs."""


class FusedLoss(_Loss, _AutogradDense, _SparseGradient, Protocol):
    """One operator forms target, loss and gradients of the sparse form, for the calls that it takes."""

    KIND: Literal["fused"]

    def plan_fused(self, call: SparseCall, form: RowForm | None, /) -> Any:
        """Return the attention's ``plan``, or a sentence that says why the operator cannot take the call."""

    def fused_loss(self, call: SparseCall, row_weight: Tensor, /) -> Tensor:
        """Return the sparse form, differentiable with respect to the indexer's three inputs."""


Loss = AutogradLoss | GradientLoss | FusedLoss

if TYPE_CHECKING:
    from mindspeed_dsa.ops.indexer_kl_loss import chunked, cpu, npu, reference, triton

    BACKENDS: tuple[Loss, ...] = (reference, chunked, cpu, triton, npu)
