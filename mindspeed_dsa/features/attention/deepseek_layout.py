"""The two places where Megatron's indexer differs from the published DeepSeek-V3.2 inference code.

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.features.attention.local_norms import norm_of_fused_layer
from mindspeed_dsa.features.host import host


def apply_rope_first(self: Any, x: Tensor, rotary_pos_emb: Tensor, mscale: float) -> Tensor:
    """In the place of ``DSAIndexer._apply_rope``; see :func:`rotate_first_dimensions`."""
    return rotate_first_dimensions(self, x, rotary_pos_emb, mscale, cp_group=self.pg_collection.cp)


def rotate_first_dimensions(
    indexer: Any, x: Tensor, rotary_pos_emb: Tensor, mscale: float, **groups: Any
) -> Tensor:
    """Rotate the first ``qk_pos_emb_head_dim`` dimensions of each indexer head, half against half.

    For position ``p`` and frequency ``f``: ``(a, b) -> (a cos pf - b sin pf, b cos pf + a sin pf)``
    with ``a`` in the first and ``b`` in the second half of the rotary dimensions.

    Args:
        indexer: the ``DSAIndexer``.
        x: ``[seqlen, batch, heads, index_head_dim]``.
        rotary_pos_emb: ``[seqlen, 1, 1, qk_pos_emb_head_dim]``, angles.
        mscale: YaRN's magnitude, 1 for plain RoPE.
        **groups: process groups for Megatron's ``apply_rotary_pos_emb``, where it takes any.

    Returns:
        Tensor of the shape and dtype of ``x``.
    """
    size = indexer.qk_pos_emb_head_dim
    rotary, plain = x.split([size, indexer.index_head_dim - size], dim=-1)
    # Megatron de-interleaves rotary dimensions whenever the model has latent attention.
    config = copy.copy(indexer.config)
    config.multi_latent_attention = False
    config.rotary_interleaved = False
    rotary = host("core.models.common.embeddings").apply_rotary_pos_emb(
        rotary, rotary_pos_emb, config=config, cu_seqlens=None, mscale=mscale, **groups
    )
    return torch.cat([rotary, plain], dim=-1)


def normalise_latent_query(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``get_query_key_value_tensors``: what it returns fourth is the indexer's input alone."""

    def get_query_key_value_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value, q_compressed, *rest = original(self, *args, **kwargs)
        config, up_projection = self.config, getattr(self, "linear_q_up_proj", None)
        # Without a fused norm it was applied before, or there is none.
        if config.experimental_attention_variant == "dsa" and hasattr(up_projection, "layer_norm_weight"):
            with torch.no_grad():  # the indexer detaches its inputs
                q_compressed = norm_of_fused_layer(up_projection, q_compressed, config)
        return query, key, value, q_compressed, *rest

    return get_query_key_value_tensors
