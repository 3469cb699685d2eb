"""Experts of transformers models on NPUs, run with our permutation, grouped matmul and weighted sum.

transformers' default implementation calls ``aten::_grouped_mm``. torch_npu has no kernel for it, and computes
it on the CPU with copies of the operands. The sort of expert indices also runs on the NPU's few CPU cores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mindspeed_dsa.ops.grouped_matmul import Groups, grouped_matmul
from mindspeed_dsa.ops.moe_permute import permute, unpermute

DEFAULT = "grouped_mm"
"""Name of transformers' default implementation, which is replaced."""
_DEVICES = ("npu",)


def wants_experts_here(model: nn.Module) -> bool:
    """Return whether a model's experts use ``grouped_mm`` on a device that has no kernel for it."""
    # A model on the meta device counts too, because its final device is unknown. Each call then checks
    # again.
    config: Any = model.config
    devices = {parameter.device.type for parameter in model.parameters()}
    return getattr(config, "_experts_implementation", None) == DEFAULT and not devices.isdisjoint(
        (*_DEVICES, "meta")
    )


def run_experts(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Run the experts of a layer. Registered with transformers' ``ExpertsInterface``.

    Args:
        self: transformers' experts module.
        hidden_states: ``[tokens, dim]``.
        top_k_index: ``[tokens, topk]`` int64. With expert parallelism, an expert of another rank has the
            index after this rank's last expert.
        top_k_weights: ``[tokens, topk]``.
        *args: further arguments of transformers' functions.
        **kwargs: further keyword arguments of transformers' functions.

    Returns:
        ``[tokens, dim]`` in the dtype of ``hidden_states``.
    """
    if not _is_served(self, hidden_states):
        from transformers.integrations.moe import grouped_mm_experts_forward

        theirs: Tensor = grouped_mm_experts_forward(
            self, hidden_states, top_k_index, top_k_weights, *args, **kwargs
        )
        return theirs
    into, out_of = self.gate_up_proj, self.down_proj
    (tokens, topk), experts = top_k_index.shape, len(into)
    # With expert parallelism an additional column collects the experts of other ranks, and is then dropped. A
    # token may have several of them. Releases without the attribute do not say whether there are any.
    some_elsewhere = getattr(self, "_is_expert_parallel", True)
    wide = (tokens, experts + some_elsewhere)
    routing = torch.zeros(wide, dtype=torch.bool, device=hidden_states.device).scatter(1, top_k_index, True)
    weights = top_k_weights.new_zeros(wide).scatter(1, top_k_index, top_k_weights)
    sizes: dict[str, Any] = {"rows": tokens * topk, "topk": topk}
    if some_elsewhere:  # the number of local rows is then unknown on the host
        routing, weights, sizes = routing[:, :experts].contiguous(), weights[:, :experts].contiguous(), {}
    permuted = permute(hidden_states.to(into.dtype), routing, **sizes)
    groups = Groups(routing.sum(0, dtype=torch.int32))
    rows = grouped_matmul(permuted.tokens, into, groups, layout="nk")
    rows = grouped_matmul(self._apply_gate(rows), out_of, groups, layout="nk")
    return unpermute(rows, permuted.row_map, tokens, weights).to(hidden_states.dtype)


def _is_served(experts: Any, hidden_states: Tensor) -> bool:
    """Return whether our operators are needed on the layer's device and support the layer."""
    others = ("has_bias", "is_transposed", "has_post_expert_norm")
    if hidden_states.device.type not in _DEVICES or any(getattr(experts, name, False) for name in others):
        return False
    if not experts.has_gate:
        return False
    return not any(isinstance(weight, DTensor) for weight in (experts.gate_up_proj, experts.down_proj))
