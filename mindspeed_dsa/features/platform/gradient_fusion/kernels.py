"""The two functions of ``fused_weight_gradient_mlp_cuda`` by other means.

Imports nothing of Megatron: fetched while Megatron is being imported.
"""

from __future__ import annotations

from torch import Tensor

from mindspeed_dsa.ops.grouped_matmul import npu


class Kernels:
    """Stand-in for the extension's module, which Megatron's linear layers call."""

    @staticmethod
    def wgrad_gemm_accum_fp32(rows: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """Add ``grad_output.T @ rows`` to ``main_grad``.

        On NPUs one operator, which rounds in fp32 only. Elsewhere a 16-bit product is rounded before it is
        added, as it is without fusion.

        Args:
            rows: ``[rows, in]``, the layer's input.
            grad_output: ``[rows, out]``, of the same dtype.
            main_grad: ``[out, in]`` fp32.
        """
        if not rows.size(0):
            return  # of an expert without tokens
        if rows.dtype == main_grad.dtype:
            main_grad.addmm_(grad_output.t(), rows)
        elif not npu.add_product(grad_output, rows, main_grad):
            main_grad.add_(grad_output.t().mm(rows))

    @staticmethod
    def wgrad_gemm_accum_fp16(rows: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """Add the same product to a ``main_grad`` in 16 bits, of the dtype of ``rows``."""
        main_grad.addmm_(grad_output.t(), rows)
