"""What a backend of this operator has; mypy checks the modules against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from mindspeed_dsa.ops.backend import Backend
from mindspeed_dsa.ops.moe_permute.row_map import Permutation


class _Permuter(Backend, Protocol):
    def plan_permute(self, tokens: Tensor, probs: Tensor | None, topk: int | None, /) -> Any:
        """See :func:`mindspeed_dsa.ops.backend.plan`."""

    def plan_unpermute(self, row_map: Tensor, rows: int, probs: Tensor | None, /) -> Any:
        """See :func:`mindspeed_dsa.ops.backend.plan`."""

    def permute(
        self,
        tokens: Tensor,
        routing_map: Tensor,
        probs: Tensor | None,
        rows: int | None,
        topk: int | None,
        /,
    ) -> Permutation:
        """Rows expert by expert."""

    def unpermute(
        self,
        permuted: Tensor,
        row_map: Tensor,
        tokens: int,
        probs: Tensor | None,
        addend: Tensor | None,
        /,
    ) -> Tensor:
        """Each token's rows, weighted and added up: ``[tokens, hidden]``."""

    def sort_chunks(
        self, tensors: Sequence[Tensor], split_sizes: Tensor, order: Tensor, /
    ) -> tuple[Tensor, ...]:
        """Chunks of rows in another order, the same for each tensor."""


class AutogradPermuter(_Permuter, Protocol):
    """Functions that autograd differentiates."""

    KIND: Literal["autograd"]


class GradientPermuter(_Permuter, Protocol):
    """Functions beside which there are those for their gradients; chunks go back by the inverse order."""

    KIND: Literal["gradients"]

    def permute_gradients(
        self, grad_permuted: Tensor | None, grad_probs: Tensor | None, row_map: Tensor, routing_map: Tensor, /
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of ``[tokens, hidden]`` and of the probabilities ``[tokens, experts]``.

        A gradient that is None is one of zeros, and so is its result; at least one is there.
        """

    def unpermute_gradients(
        self, grad: Tensor, row_map: Tensor, rows: int, permuted: Tensor | None, probs: Tensor | None, /
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the permuted rows, and of the probabilities where there are some."""


Permuter = AutogradPermuter | GradientPermuter

if TYPE_CHECKING:
    from mindspeed_dsa.ops.moe_permute import cpu, npu, reference, triton

    BACKENDS: tuple[Permuter, ...] = (reference, cpu, triton, npu)
