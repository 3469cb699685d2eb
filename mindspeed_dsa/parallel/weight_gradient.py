"""The weight's gradient, into ``main_grad`` where Megatron accumulates there, in one piece or in several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Megatron


class WeightGradient:
    """Gradient of a linear layer's weight, summed over the rows that :meth:`add` is given.

    Args:
        weight: ``[out, in]``, the parameter.
        rows: ``[rows, in]``, contiguous: the layer's input as it was kept for backward.
        main_grad: ``[out, in]``, where gradients accumulate, or ``None``.
        fusion: Megatron's ``gradient_accumulation_fusion``: the product is added to ``main_grad`` directly.
        megatron: whose fused kernels add it.
    """

    def __init__(
        self, weight: Tensor, rows: Tensor, main_grad: Tensor | None, fusion: bool, megatron: Megatron
    ) -> None:
        self._weight, self.rows, self._fusion = weight, rows, fusion
        if fusion and main_grad is not None:
            # A weight that several layers share may have lost it since the forward.
            self._weight.main_grad = main_grad  # type: ignore[attr-defined]
        self._sum: Tensor | None = None
        self._megatron = megatron

    @property
    def in_pieces(self) -> bool:
        """Whether several calls of :meth:`add` are as accurate as one: sums are kept in 32 bits or more."""
        target: Tensor = self._weight.main_grad if self._fusion else self._weight  # type: ignore[attr-defined]
        return target.dtype in (torch.float32, torch.float64)

    def add(self, grad_output: Tensor, rows: Tensor) -> None:
        """Add ``grad_output.T @ rows``.

        Args:
            grad_output: ``[rows, out]``, contiguous.
            rows: ``[rows, in]``, contiguous.
        """
        if self._fusion:
            self._add_to_main_grad(grad_output, rows)
        elif self._sum is None:
            self._sum = torch.mm(grad_output.t(), rows)
        else:
            torch.addmm(self._sum, grad_output.t(), rows, out=self._sum)

    def _add_to_main_grad(self, grad_output: Tensor, rows: Tensor) -> None:
        layers = self._megatron("core.tensor_parallel.layers")
        main_grad = self._weight.main_grad  # type: ignore[attr-defined]
        if main_grad.dtype == torch.float32:
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(rows, grad_output, main_grad)
        elif main_grad.dtype in (torch.float16, torch.bfloat16):
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(rows, grad_output, main_grad)
        else:
            raise RuntimeError(
                f"gradient accumulation fusion takes main_grad in fp32, fp16 or bf16, not {main_grad.dtype}; "
                "use --no-gradient-accumulation-fusion"
            )

    def result(self, dtype: torch.dtype) -> Tensor | None:
        """What backward returns for the weight.

        With fusion that is a placeholder, so that hooks run, where Megatron's DDP asks for one
        (``grad_added_to_main_grad``), and nothing elsewhere.

        Args:
            dtype: of the placeholder.
        """
        if not self._fusion:
            return self._sum
        return placeholder(self._weight, dtype, self._megatron)


def placeholder(weight: Any, dtype: torch.dtype, megatron: Megatron) -> Tensor | None:
    """What backward returns for a weight whose gradient is in ``main_grad`` already.

    Something, so that hooks run, where Megatron's DDP asks for it (``grad_added_to_main_grad``), and nothing
    elsewhere.

    Args:
        weight: the parameter; it is marked.
        dtype: of the placeholder.
        megatron: whose shared placeholder it may be.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    zero = bool(getattr(weight, "zero_out_wgrad", False))
    layers = megatron("core.tensor_parallel.layers")
    shared = getattr(layers, "get_dummy_wgrad", None)
    if shared is not None:
        found: Tensor = shared(list(weight.main_grad.shape), dtype, zero=zero)
        return found
    make = torch.zeros if zero else torch.empty
    return make(weight.main_grad.shape, dtype=dtype, device=weight.device)
