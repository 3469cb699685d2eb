"""What a backend of this operator has; mypy checks the modules against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from mindspeed_dsa.ops.backend import Backend
from mindspeed_dsa.ops.row_ranges import Ranges


class _Indexer(Backend, Protocol):
    def plan_call(self, topk: int, ranges: Ranges, key_length: int, use_relu: bool, in_order: bool, /) -> Any:
        """See :func:`mindspeed_dsa.ops.backend.plan`; what it finds are the other functions' ``found``."""


class AutogradIndexer(_Indexer, Protocol):
    """Functions that autograd differentiates."""

    KIND: Literal["autograd"]

    def lightning_indexer(
        self,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        topk: int,
        starts: Tensor,
        ends: Tensor,
        use_relu: bool,
        /,
    ) -> tuple[Tensor, Tensor]:
        """Indices and scores of the selected keys, ``[batch, query_length, topk]`` each."""

    def selected_scores(
        self, query: Tensor, key: Tensor, weights: Tensor, topk_indices: Tensor, use_relu: bool, /
    ) -> Tensor:
        """Scores at given entries, ``[batch, query_length, topk]``."""


class GradientIndexer(_Indexer, Protocol):
    """Functions beside which there is one for their gradients."""

    KIND: Literal["gradients"]

    def select(
        self,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        topk: int,
        starts: Tensor,
        ends: Tensor,
        use_relu: bool,
        /,
        *found: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Indices and scores of the selected keys, ``[batch, query_length, topk]`` each."""

    def scores_at(
        self, query: Tensor, key: Tensor, weights: Tensor, topk_indices: Tensor, use_relu: bool, /
    ) -> Tensor:
        """Scores at given entries, ``[batch, query_length, topk]``."""

    def score_gradients(
        self,
        grad_scores: Tensor,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        topk_indices: Tensor,
        use_relu: bool,
        /,
        *found: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the scores at ``topk_indices`` with respect to query, key and weights.

        That of the keys, a sum over rows, may be wider than they are. ``found`` is left out for indices that
        come from elsewhere.
        """


Indexer = AutogradIndexer | GradientIndexer

if TYPE_CHECKING:
    from mindspeed_dsa.ops.lightning_indexer import chunked, cpu, npu, reference, triton

    BACKENDS: tuple[Indexer, ...] = (reference, chunked, cpu, triton, npu)
