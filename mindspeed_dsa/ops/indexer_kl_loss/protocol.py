"""What a backend of this operator has; mypy checks the modules against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.ops.backend import Backend
from mindspeed_dsa.ops.row_ranges import Ranges, RowForm


class _Loss(Backend, Protocol):
    def attention_sum(
        self, query: Tensor, key: Tensor, topk_indices: Tensor, lse: Tensor | None, softmax_scale: float, /
    ) -> Tensor:
        """Main attention over the selected keys, summed over this rank's heads."""

    def plan_dense(
        self,
        index_query: Tensor,
        query: Tensor,
        ranges: Ranges,
        key_length: int,
        row_mask: Tensor | None,
        tp_group: dist.ProcessGroup | None,
        use_relu: bool,
        /,
    ) -> Any:
        """See :func:`mindspeed_dsa.ops.backend.plan`; what it finds is ``dense_loss``'s ``found``."""


class _AutogradDense(Protocol):
    def dense_loss(
        self,
        index_query: Tensor,
        index_key: Tensor,
        index_weights: Tensor,
        query: Tensor,
        key: Tensor,
        softmax_scale: float,
        starts: Tensor,
        ends: Tensor,
        row_weights: Tensor,
        tp_group: dist.ProcessGroup | None,
        use_relu: bool,
        /,
        *found: Any,
        **options: Any,
    ) -> Tensor:
        """The dense form, differentiable with respect to the indexer's three inputs."""


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
        """The sparse form's loss and its gradient with respect to ``topk_scores``."""


class AutogradLoss(_Loss, _AutogradDense, Protocol):
    """Both forms are differentiated by autograd."""

    KIND: Literal["autograd"]

    def divergence(
        self, topk_scores: Tensor, attention_sum: Tensor, valid: Tensor, row_weights: Tensor, /
    ) -> Tensor:
        """The sparse form's loss, differentiable with respect to ``topk_scores``."""


class GradientLoss(_Loss, _SparseGradient, Protocol):
    """Both forms return their gradients with the loss."""

    KIND: Literal["gradients"]

    def dense_loss_and_gradients(
        self,
        index_query: Tensor,
        index_key: Tensor,
        index_weights: Tensor,
        query: Tensor,
        key: Tensor,
        softmax_scale: float,
        starts: Tensor,
        ends: Tensor,
        row_weights: Tensor,
        tp_group: dist.ProcessGroup | None,
        use_relu: bool,
        /,
        *found: Any,
        **options: Any,
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """The dense form's loss and its gradients with respect to the indexer's three inputs.

        ``with_gradients`` says by name whether the gradients are wanted.
        """


class FusedLoss(_Loss, _AutogradDense, _SparseGradient, Protocol):
    """One operator forms target, loss and gradients of the sparse form, for the calls that it takes."""

    KIND: Literal["fused"]

    def plan_fused(
        self,
        index_query: Tensor,
        query: Tensor,
        topk_indices: Tensor,
        key_length: int,
        lse: Tensor | None,
        row_mask: Tensor | None,
        tp_group: dist.ProcessGroup | None,
        use_relu: bool,
        form: RowForm | None,
        /,
    ) -> Any:
        """Why the operator cannot take the call, a sentence, or what it wants as ``found``."""

    def fused_loss(
        self,
        index_query: Tensor,
        index_key: Tensor,
        index_weights: Tensor,
        query_parts: tuple[Tensor, ...],
        key: Tensor,
        topk_indices: Tensor,
        softmax_scale: float,
        lse: Any,
        row_weight: Tensor,
        tp_group: dist.ProcessGroup | None,
        found: Any,
        /,
    ) -> Tensor:
        """The sparse form, differentiable with respect to the indexer's three inputs.

        The query comes in one piece, or as its latent and its rotary part.
        """


Loss = AutogradLoss | GradientLoss | FusedLoss

if TYPE_CHECKING:
    from mindspeed_dsa.ops.indexer_kl_loss import chunked, cpu, npu, reference, triton

    BACKENDS: tuple[Loss, ...] = (reference, chunked, cpu, triton, npu)
