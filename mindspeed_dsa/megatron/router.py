"""The router's gating matmul without Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.patches.compose import depends_on


@depends_on(attrgetter("megatron"))
def gate_without_transformer_engine(
    original: Callable[..., Any], context: Context[Any]
) -> Callable[..., Any]:
    """Decorate ``router_gating_linear``: a differentiable matmul where there is no kernel.

    Several features claim this row; the engine applies it once.
    """

    def router_gating_linear(inp: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Any:
        if context.megatron("core.extensions.transformer_engine").HAVE_TE:
            return original(inp, weight, *rest, **named)
        # From 0.15 on the signature has a bias before the dtype.
        *biases, router_dtype = *rest, *named.values()
        bias = biases[0] if biases else None
        # [tokens, hidden] x [experts, hidden]^T -> [tokens, experts]; gradients return in the inputs' dtypes.
        bias = None if bias is None else bias.to(router_dtype)
        return F.linear(inp.to(router_dtype), weight.to(router_dtype), bias)

    return router_gating_linear
