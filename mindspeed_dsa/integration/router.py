"""The router's gating matmul without Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def gate_without_transformer_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``router_gating_linear``: a differentiable matmul where there is no kernel.

    Several features claim this row. Without a context in the signature the engine applies it once, so the
    Megatron whose Transformer Engine counts is the one that the original belongs to.
    """
    core, _, _ = original.__module__.rpartition(".transformer.moe.moe_utils")

    def router_gating_linear(inp: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Any:
        if import_module(f"{core}.extensions.transformer_engine").HAVE_TE:
            return original(inp, weight, *rest, **named)
        # From 0.15 on the signature has a bias before the dtype.
        *biases, router_dtype = *rest, *named.values()
        bias = biases[0] if biases else None
        # [tokens, hidden] x [experts, hidden]^T -> [tokens, experts]; gradients return in the inputs' dtypes.
        bias = None if bias is None else bias.to(router_dtype)
        return F.linear(inp.to(router_dtype), weight.to(router_dtype), bias)

    return router_gating_linear
