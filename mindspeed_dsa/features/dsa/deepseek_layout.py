"""Rotary dimensions of indexer heads as in the published DeepSeek-V3.2 inference code."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Megatron


def rotate_first_dimensions(
    megatron: Megatron, indexer: Any, x: Tensor, rotary_pos_emb: Tensor, mscale: float, **groups: Any
) -> Tensor:
    """Rotate the first ``qk_pos_emb_head_dim`` dimensions of each indexer head, half against half.

    For position ``p`` and frequency ``f``: ``(a, b) -> (a cos pf - b sin pf, b cos pf + a sin pf)``
    with ``a`` in the first and ``b`` in the second half of the rotary dimensions.

    Args:
        megatron: the session's.
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
    rotary = megatron("core.models.common.embeddings").apply_rotary_pos_emb(
        rotary, rotary_pos_emb, config=config, cu_seqlens=None, mscale=mscale, **groups
    )
    return torch.cat([rotary, plain], dim=-1)
