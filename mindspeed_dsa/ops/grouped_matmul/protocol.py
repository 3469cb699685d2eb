"""What a backend of this operator has; mypy checks the modules against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from mindspeed_dsa.ops.backend import Backend
from mindspeed_dsa.ops.grouped_matmul.groups import Groups


class GroupedMatmul(Backend, Protocol):
    """Three products, of which two are one function: dX is the product with the transposed weight.

    Matrices come as views in which one of the two last axes is contiguous, whichever it is. There is at
    least one row, but in the reference.
    """

    def multiply(self, rows: Tensor, weight: Tensor, groups: Groups, /) -> Tensor:
        """``[rows, in]`` and ``[groups, in, out]`` to ``[rows, out]`` in the dtype of ``rows``."""

    def weight_gradient(
        self, rows: Tensor, grad_output: Tensor, groups: Groups, into: Tensor, accumulate: bool, /
    ) -> None:
        """``rows.T @ grad_output`` of each group, added to ``into`` or written to it.

        Args:
            rows: ``[rows, in]``.
            grad_output: ``[rows, out]``, contiguous.
            groups: of which rows belong together.
            into: ``[groups, in, out]``, in the dtype of ``rows`` or a wider one.
            accumulate: add; otherwise groups without rows get zeros.
        """


if TYPE_CHECKING:
    from mindspeed_dsa.ops.grouped_matmul import cpu, npu, reference, triton

    BACKENDS: tuple[GroupedMatmul, ...] = (reference, cpu, triton, npu)
