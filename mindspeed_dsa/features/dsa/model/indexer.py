"""Patches for indexer options of the model configuration, in releases before 0.19.

The options are about rotary embedding, Hadamard rotation, latent query, key norm and scores.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.dsa.index_projection import projection_of
from mindspeed_dsa.features.dsa.model.feature import Options
from mindspeed_dsa.megatron.adapters import base_of
from mindspeed_dsa.megatron.local_modules import SequenceParallelLayerNorm, norm_of_fused_layer
from mindspeed_dsa.patches.errors import MindSpeedDSAError

# -- rotary embedding --------------------------------------------------------------------------


def rotate_first_dimensions(
    megatron: Megatron, indexer: Any, x: Tensor, rotary_pos_emb: Tensor, mscale: float, **groups: Any
) -> Tensor:
    """Rotate the first ``qk_pos_emb_head_dim`` dimensions of each indexer head.

    Each pair of dimensions ``(a, b)`` becomes ``(a cos pf - b sin pf, b cos pf + a sin pf)`` for position
    ``p`` and frequency ``f``. In DeepSeek's models, ``a`` is in the first half of the rotary dimensions and
    ``b`` in the second. With ``dsa_indexer_rope_interleaved`` (GLM), ``a`` is an even dimension and ``b`` the
    next odd one. The result then has all even dimensions first, as in Megatron, which does not change dot
    products of query and key.

    Args:
        megatron: Megatron of the job.
        indexer: ``DSAIndexer`` module.
        x: indexer queries or keys ``[s, b, heads, index_head_dim]``.
        rotary_pos_emb: angles ``[s, 1, 1, qk_pos_emb_head_dim]``.
        mscale: YaRN's magnitude scale, 1 for plain RoPE.
        **groups: process group arguments of Megatron's ``apply_rotary_pos_emb``, in releases that have them.

    Returns:
        Tensor with shape and dtype of ``x``.
    """
    size = indexer.qk_pos_emb_head_dim
    # [s, b, heads, rope], [s, b, heads, index_head_dim - rope]
    rotary, plain = x.split([size, indexer.index_head_dim - size], dim=-1)
    # With multi_latent_attention, Megatron de-interleaves the rotary dimensions: use it as the switch.
    config = copy.copy(indexer.config)
    config.multi_latent_attention = config.dsa_indexer_rope_interleaved
    config.rotary_interleaved = False
    rotary = megatron("core.models.common.embeddings").apply_rotary_pos_emb(
        rotary, rotary_pos_emb, config=config, cu_seqlens=None, mscale=mscale, **groups
    )
    return torch.cat([rotary, plain], dim=-1)


def rotate_as_configured(original: Callable[..., Tensor], context: Context[Options]) -> Callable[..., Tensor]:
    """Decorate ``DSAIndexer._apply_rope`` to rotate the first dimensions if configured, not the last."""

    def _apply_rope(self: Any, x: Tensor, rotary_pos_emb: Tensor, mscale: float) -> Tensor:
        if not self.config.dsa_indexer_rope_first:
            return original(self, x, rotary_pos_emb, mscale)
        groups = {"cp_group": self.pg_collection.cp}
        return rotate_first_dimensions(context.megatron, self, x, rotary_pos_emb, mscale, **groups)

    return _apply_rope


# -- latent query ------------------------------------------------------------------------------


def normalise_latent_query(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate MLA's ``get_query_key_value_tensors``: normalise the indexer's latent query (4th result)."""

    def get_query_key_value_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value, q_compressed, *rest = original(self, *args, **kwargs)
        config = self.config
        up_projection = base_of(self.linear_q_up_proj) if config.q_lora_rank is not None else None
        wanted = config.experimental_attention_variant == "dsa" and config.dsa_indexer_normalised_query
        # Without a fused norm, the latent query was normalised before, or the model has no norm.
        if wanted and hasattr(up_projection, "layer_norm_weight"):
            with torch.no_grad():  # the indexer detaches its inputs
                q_compressed = norm_of_fused_layer(up_projection, q_compressed, config)
        return query, key, value, q_compressed, *rest

    return get_query_key_value_tensors


# -- key norm ----------------------------------------------------------------------------------


class LayerNormInFP32(SequenceParallelLayerNorm):
    """LayerNorm computed in fp32, with fp32 copies of its parameters. Output has the input's dtype."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise hidden states ``[..., hidden_size]``."""
        # zero_centered_gamma stores weight - 1
        weight = self.weight.float() + (1 if self.zero_centered_gamma else 0)
        normalised = torch.nn.functional.layer_norm(
            hidden_states.float(), self.normalized_shape, weight, self.bias.float(), self.eps
        )
        return normalised.to(hidden_states.dtype)


def key_norm_epsilon(config: Any) -> float:
    """Return the epsilon of the indexer's key norm; default: the epsilon of the model's other norms."""
    epsilon: float | None = config.dsa_indexer_k_norm_epsilon
    return float(config.layernorm_epsilon) if epsilon is None else epsilon


def build_key_norm(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``DSAIndexer.__init__`` to build the key norm with the configured epsilon and precision."""

    def __init__(self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(config, "dsa_indexer_k_norm_fp32"):
            raise MindSpeedDSAError(
                f"mindspeed_dsa: {context.feature}: this model's configuration was made before "
                "mindspeed_dsa.enable() was called, and lacks its fields; enable features before"
            )
        k_norm = submodules.k_norm
        norm_class = LayerNormInFP32 if config.dsa_indexer_k_norm_fp32 else k_norm

        class KeyNorm:
            """Factory in place of the spec's key norm, because Megatron passes its own epsilon."""

            def __new__(cls, config: Any, hidden_size: int, eps: float) -> Any:
                build_module = context.megatron("core.transformer.spec_utils").build_module
                return build_module(
                    norm_class, config=config, hidden_size=hidden_size, eps=key_norm_epsilon(config)
                )

        if norm_class is not k_norm or config.dsa_indexer_k_norm_epsilon is not None:
            submodules = dataclasses.replace(submodules, k_norm=KeyNorm)
        original(self, config, submodules, *args, **kwargs)

    return __init__


# -- Hadamard rotation and scores --------------------------------------------------------------


class _Rotation:
    """State that tells ``rotate_activation`` whether the running indexer uses the Hadamard rotation."""

    def __init__(self, context: Context[Options]) -> None:
        self.is_wanted = True

    @contextmanager
    def of(self, indexer: Any) -> Iterator[None]:
        """Context in which the rotation is on or off, as the indexer's configuration says."""
        before, self.is_wanted = self.is_wanted, indexer.config.dsa_indexer_rotate_activation
        try:
            yield
        finally:
            self.is_wanted = before


def rotate_where_wanted(original: Callable[..., Tensor], context: Context[Options]) -> Callable[..., Tensor]:
    """Decorate ``rotate_activation`` to return its input if the model's configuration has no rotation."""
    rotation = context.state(_Rotation)

    def rotate_activation(x: Tensor) -> Tensor:
        return original(x) if rotation.is_wanted else x

    return rotate_activation


def project_with_scores(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``DSAIndexer.forward_with_scores`` of 0.16 to switch the rotation on or off."""
    rotation = context.state(_Rotation)

    def forward_with_scores(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rotation.of(self):
            return original(self, *args, **kwargs)

    return forward_with_scores


def score_without_relu(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``DSAIndexer._compute_index_scores`` of 0.16 to support scores without ReLU."""

    def _compute_index_scores(self: Any, q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
        if self.config.dsa_indexer_scoring_relu:
            return original(self, q, weights, k)
        # Without ReLU heads can be summed before the product: [s, b, heads, dim] -> [s, b, dim]
        query = (q.float() * weights.float().unsqueeze(-1)).sum(dim=2)
        return torch.einsum("sbd,tbd->bst", query, k.float())  # [b, s, keys]

    return _compute_index_scores


def project(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``DSAIndexer.forward_before_topk`` of 0.17 and 0.18: optional rotation and optional ReLU.

    Megatron's own score functions always apply ReLU. For scores without ReLU they get two heads in place of
    all heads; see :func:`heads_without_relu`.
    """
    rotation = context.state(_Rotation)

    def forward_before_topk(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rotation.of(self):
            query, key, weights = original(self, *args, **kwargs)
        if not self.config.dsa_indexer_scoring_relu and projection_of(self) is None:
            query, weights = heads_without_relu(query, weights)
        return query, key, weights

    return forward_before_topk


def heads_without_relu(query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return two heads that, with ReLU, give the same scores as all heads without ReLU.

    ``sum_h w_h (q_h . k) = s = relu(s) - relu(-s)`` with ``s = (sum_h w_h q_h) . k``.

    Args:
        query: index query ``[s, b, heads, head_dim]``.
        weights: head weights ``[s, b, heads]``.

    Returns:
        fp32 query ``[s, b, 2, head_dim]`` and weights ``[s, b, 2]``.
    """
    together = (query.float() * weights.float().unsqueeze(-1)).sum(dim=2, keepdim=True)  # [s, b, 1, head_dim]
    sign = 1 - 2 * torch.arange(2, dtype=torch.float32, device=query.device)  # [1, -1]
    return together * sign[:, None], sign.expand(*weights.shape[:2], 2)
