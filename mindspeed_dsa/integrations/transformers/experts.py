"""Experts of transformers' models on NPUs: permutation, grouped products and weighted sum on our operators.

The products that transformers takes by default, ``aten::_grouped_mm``, have no kernel in torch_npu, which
brings them to the CPU and back; and its sort of experts' numbers is left to the device's few processor cores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mindspeed_dsa.ops.grouped_matmul import Groups, grouped_matmul
from mindspeed_dsa.ops.moe_permute import permute, unpermute

DEFAULT = "grouped_mm"
"""Name of transformers' own implementation, whose place this one takes."""
_DEVICES = ("npu",)


def wants_experts_here(model: nn.Module) -> bool:
    """Return whether a model's experts run by default on a device that has no kernel for that.

    A model without memory yet, whose device nobody knows, is one of them: each call looks again.
    """
    config: Any = model.config
    devices = {parameter.device.type for parameter in model.parameters()}
    return getattr(config, "_experts_implementation", None) == DEFAULT and not devices.isdisjoint(
        (*_DEVICES, "meta")
    )


def run_experts(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Run the experts of a layer: the function that is registered with ``transformers``' experts.

    Args:
        self: transformers' experts.
        hidden_states: ``[tokens, dim]``.
        top_k_index: ``[tokens, topk]`` int64; with experts on several ranks those of others have the number
            after this rank's last.
        top_k_weights: ``[tokens, topk]``.
        *args: arguments of transformers' own functions.
        **kwargs: likewise.

    Returns:
        ``[tokens, dim]``, in the dtype of ``hidden_states``.
    """
    if not _is_served(self, hidden_states):
        from transformers.integrations.moe import grouped_mm_experts_forward

        theirs: Tensor = grouped_mm_experts_forward(
            self, hidden_states, top_k_index, top_k_weights, *args, **kwargs
        )
        return theirs
    into, out_of = self.gate_up_proj, self.down_proj
    (tokens, topk), experts = top_k_index.shape, len(into)
    # Experts of other ranks get a column of their own, which is left out: a token may have several. Earlier
    # releases do not say whether there are any.
    some_elsewhere = getattr(self, "_is_expert_parallel", True)
    wide = (tokens, experts + some_elsewhere)
    chosen = torch.zeros(wide, dtype=torch.bool, device=hidden_states.device).scatter(1, top_k_index, True)
    weights = top_k_weights.new_zeros(wide).scatter(1, top_k_index, top_k_weights)
    known: dict[str, Any] = {"rows": tokens * topk, "topk": topk}
    if some_elsewhere:
        chosen, weights, known = chosen[:, :experts].contiguous(), weights[:, :experts].contiguous(), {}
    permuted = permute(hidden_states.to(into.dtype), chosen, **known)
    groups = Groups(chosen.sum(0, dtype=torch.int32))
    rows = grouped_matmul(permuted.tokens, into, groups, layout="nk")
    rows = grouped_matmul(self._apply_gate(rows), out_of, groups, layout="nk")
    return unpermute(rows, permuted.row_map, tokens, weights).to(hidden_states.dtype)


def _is_served(experts: Any, hidden_states: Tensor) -> bool:
    """Return whether a layer's device needs these operators, and they have what its products are made of."""
    others = ("has_bias", "is_transposed", "has_post_expert_norm")
    if hidden_states.device.type not in _DEVICES or any(getattr(experts, name, False) for name in others):
        return False
    if not experts.has_gate:
        return False
    return not any(isinstance(weight, DTensor) for weight in (experts.gate_up_proj, experts.down_proj))
