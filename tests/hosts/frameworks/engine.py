"""Transformer Engine's linear layers and norms, computed by PyTorch on CPUs.

Only what layers of Megatron and adapters read: shapes of one rank, ``parallel_mode``, marks of weights, and
the output of a fused norm where it is asked for.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter


def install() -> None:
    """Put the layers into the module that :func:`tests.hosts.frameworks.stand_ins.load` has made."""
    module = sys.modules["transformer_engine.pytorch"]
    offload = sys.modules["transformer_engine.pytorch.cpu_offload"]
    offload.get_cpu_offload_context = lambda *args, **kwargs: (nullcontext(), lambda states: states)
    for layer in (Linear, LayerNormLinear, LayerNorm, RMSNorm):
        setattr(module, layer.__name__, layer)


class Linear(torch.nn.Module):
    """``te.pytorch.Linear``: split along outputs (column), along inputs (row), or not at all (None)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Any = None,
        bias: bool = False,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype = torch.float32,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert (bias, return_bias) == (False, False), "no layer of these models has a bias"
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.use_bias = False
        self.weight = Parameter(torch.zeros(self.out_features, self.in_features, dtype=params_dtype))
        # As Transformer Engine does, also where the weight is not split.
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.weight.partition_dim = int(parallel_mode == "row")  # type: ignore[attr-defined]
        self.weight.partition_stride = 1  # type: ignore[attr-defined]

    def forward(self, states: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        group = {"group": self.tp_group}
        if self.parallel_mode == "column" and self.tp_size > 1:
            if self.sequence_parallel:
                states = mappings.gather_from_sequence_parallel_region(states, **group)
            else:
                states = mappings.copy_to_tensor_model_parallel_region(states, **group)
        states = F.linear(states, self.weight)
        if self.parallel_mode == "row" and self.tp_size > 1:
            if self.sequence_parallel:
                return mappings.reduce_scatter_to_sequence_parallel_region(states, **group)
            return mappings.reduce_from_tensor_model_parallel_region(states, **group)
        return states


class LayerNormLinear(Linear):
    """``te.pytorch.LayerNormLinear`` with RMSNorm."""

    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        assert options["normalization"] == "RMSNorm"
        self.eps, self.return_layernorm_output = eps, options["return_layernorm_output"]
        self.layer_norm_weight = Parameter(torch.ones(in_features, dtype=self.weight.dtype))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = F.rms_norm(states, (self.in_features,), self.layer_norm_weight, self.eps)
        output = super().forward(normed)
        if not self.return_layernorm_output:
            return output
        # Megatron-Bridge asks for this, so that its adapters need not gather.
        if getattr(self, "return_layernorm_output_gathered", False) and self.sequence_parallel:
            from megatron.core.tensor_parallel import mappings

            normed = mappings.gather_from_sequence_parallel_region(normed, group=self.tp_group)
        return output, normed


class RMSNorm(torch.nn.Module):
    """``te.pytorch.RMSNorm``."""

    def __init__(
        self,
        hidden_size: int = 0,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype = torch.float32,
        normalized_shape: int = 0,  # the size's name since Megatron-core 0.17
        **unused: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = Parameter(torch.ones(hidden_size or normalized_shape, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: Tensor) -> Tensor:
        return F.rms_norm(states, self.weight.shape, self.weight, self.eps)


class LayerNorm(RMSNorm):
    """``te.pytorch.LayerNorm``."""

    def __init__(self, sequence_parallel: bool = False, **options: Any) -> None:
        super().__init__(sequence_parallel=sequence_parallel, **options)
        self.bias = Parameter(torch.zeros_like(self.weight))
        self.bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: Tensor) -> Tensor:
        return F.layer_norm(states, self.weight.shape, self.weight, self.bias, self.eps)
