"""Patches that exclude padding of packed documents from router losses, router counts and indexer losses.

Padding tokens are still routed to experts, but give them no gradient. Does not import Megatron, because it is
loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mindspeed_dsa.context_parallel.packs import PackRows
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.attention.padding.routers import weighed
from mindspeed_dsa.platforms.host_pool import upload


def mask_padding(original: Callable[..., Any], context: Context[Any]) -> Callable[..., Any]:
    """Decorate ``TransformerLayer.forward`` to set the padding masks, also when the layer is recomputed."""
    masks_of_packs: Any = WeakIdKeyDictionary()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        params: Any = kwargs.get("packed_seq_params")
        if getattr(params, "qkv_format", "") == "thd":
            states = args[0] if args else kwargs["hidden_states"]
            # All layers share one description per microbatch, so masks are built once per shape.
            masks = masks_of_packs.setdefault(params, {})
            if states.size(0) not in masks:
                masks[states.size(0)] = _masks(self, params, states, context)
            tokens, padding = masks[states.size(0)]
            if getattr(params, "real_token_mask_q", None) is None:
                # The indexer loss of Megatron 0.19 leaves out rows outside this mask, but nothing in
                # Megatron sets the mask.
                params.real_token_mask_q = tokens
            is_routed = getattr(getattr(self, "mlp", None), "router", None) is not None
            if is_routed and kwargs.get("padding_mask") is None:
                kwargs["padding_mask"] = padding
        return original(self, *args, **kwargs)

    return forward


def _masks(
    layer: Any, params: Any, states: Tensor, context: Context[Any]
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return masks of document tokens ``[1, queries]`` and of padding ``[1, rows]``; None without padding."""
    # With sequence parallelism a rank has more queries than rows of hidden states.
    state = context.megatron("core.parallel_state")
    parts = state.get_tensor_model_parallel_world_size() if layer.config.sequence_parallel else 1
    pack = PackRows.of(params, states.size(0) * parts, state.get_context_parallel_group())
    if pack.counted is None:
        return None, None
    counted = upload(pack.counted[None], states.device)  # [1, queries]
    own_rows = counted.chunk(parts, dim=1)[state.get_tensor_model_parallel_rank() if parts > 1 else 0]
    return counted, ~own_rows  # [1, queries], [1, rows]


def weigh_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``TopKRouter.routing`` to weight each rank's z-loss by its number of tokens.

    Megatron averages the per-rank means, although ranks have different numbers of tokens. With
    ``calculate_per_token_loss`` Megatron itself weights by tokens, and this does nothing.
    """

    def routing(self: Any, logits: Tensor, padding_mask: Tensor | None = None, **others: Any) -> Any:
        config, group = self.config, self.tp_cp_group
        has_loss = self.training and torch.is_grad_enabled() and config.moe_z_loss_coeff is not None
        if padding_mask is None or not has_loss or config.calculate_per_token_loss or group.size() == 1:
            return original(self, logits, padding_mask, **others)
        tokens = (~padding_mask).sum().float()
        # The other ranks' numbers of tokens are summed by a collective, as in Megatron's balancing losses.
        all_ranks = tokens.clone()
        dist.all_reduce(all_ranks, group=group)
        # With 4 ranks, 300 of 1000 tokens here: weight 300 * 4 / 1000 = 1.2.
        with weighed(tokens * group.size() / all_ranks.clamp_min(1)):
            return original(self, logits, padding_mask, **others)

    return routing
