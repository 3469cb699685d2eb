"""Inputs of the indexer: its Hadamard rotation, DeepSeek's rotary embedding, the normalised latent query.

Imports nothing of Megatron: fetched while Megatron is being imported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.megatron.local_modules import norm_of_fused_layer

# -- dsa-hadamard: the orthonormal Walsh-Hadamard transform as a matmul -------------------------


@lru_cache(maxsize=8)
def sylvester_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the symmetric ``[size, size]`` matrix of +1 and -1, ``H[i, j] = (-1) ** popcount(i & j)``.

    Raises:
        ValueError: ``size`` is not a power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(
            f"the Hadamard rotation needs a power of two, but the indexer's head size is {size}; "
            "set dsa_indexer_head_dim to 64 or 128"
        )
    # The matrix is cached: an inference tensor created under inference_mode could not be used in training
    # later.
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, dtype=dtype, device=device)
        while matrix.size(0) < size:
            top = torch.cat([matrix, matrix], dim=1)
            matrix = torch.cat([top, torch.cat([matrix, -matrix], dim=1)], dim=0)
        return matrix


def hadamard_rotation(activation: Tensor) -> Tensor:
    """Multiply the last dimension by the orthonormal Hadamard matrix.

    Sums in fp32 (fp64 for fp64 input) and rounds once, at the end, to the input's dtype. Being
    orthonormal it leaves ``query @ key`` unchanged up to rounding; it is its own inverse.

    Args:
        activation: ``[..., size]``, ``size`` a power of two; any floating dtype.

    Returns:
        Tensor of the same shape and dtype.

    Raises:
        ValueError: ``size`` is not a power of two.
    """
    size = activation.size(-1)
    dtype = torch.promote_types(activation.dtype, torch.float32)
    matrix = sylvester_matrix(size, dtype, activation.device)
    rotated: Tensor = activation.to(dtype) @ matrix * size**-0.5
    return rotated.to(activation.dtype)


def rotate_anywhere(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``rotate_activation``: a matmul where the CUDA package does not apply."""
    dsa = context.megatron("core.transformer.experimental_attention_variant.dsa")

    def rotate_activation(x: Tensor) -> Any:
        if x.is_cuda and x.dtype == torch.bfloat16 and dsa.hadamard_transform is not None:
            return original(x)
        return hadamard_rotation(x)

    return rotate_activation


# -- dsa-rope-first: rotary dimensions as in the published DeepSeek-V3.2 inference code ---------


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


def rotate_first(context: Context[None]) -> Callable[..., Tensor]:
    """Replace ``DSAIndexer._apply_rope`` by :func:`rotate_first_dimensions`."""

    def _apply_rope(self: Any, x: Tensor, rotary_pos_emb: Tensor, mscale: float) -> Tensor:
        return rotate_first_dimensions(
            context.megatron, self, x, rotary_pos_emb, mscale, cp_group=self.pg_collection.cp
        )

    return _apply_rope


# -- dsa-normalised-query ----------------------------------------------------------------------


def normalise_latent_query(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``get_query_key_value_tensors``: its fourth result is only the indexer's input."""

    def get_query_key_value_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value, q_compressed, *rest = original(self, *args, **kwargs)
        config, up_projection = self.config, getattr(self, "linear_q_up_proj", None)
        # Without a fused norm it was applied before, or there is none.
        if config.experimental_attention_variant == "dsa" and hasattr(up_projection, "layer_norm_weight"):
            with torch.no_grad():  # the indexer detaches its inputs
                q_compressed = norm_of_fused_layer(up_projection, q_compressed, config)
        return query, key, value, q_compressed, *rest

    return get_query_key_value_tensors
