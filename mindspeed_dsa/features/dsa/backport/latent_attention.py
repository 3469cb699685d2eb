"""Patches that give MLA layers a DSA core attention and its inputs.

Imports Megatron only when called, because these functions are loaded while Megatron is being imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.context_parallel.key_exchange import KeyExchange
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.absorb import (
    by_head_is_faster,
    query_beside_key,
    start_with_key,
    up_projections,
)
from mindspeed_dsa.features.dsa.backport.attention import core_attention_spec
from mindspeed_dsa.features.dsa.backport.feature import Options
from mindspeed_dsa.features.dsa.backport.job import problems_of
from mindspeed_dsa.features.dsa.key_exchange.exchange import key_exchange
from mindspeed_dsa.features.dsa.operands import query_and_key
from mindspeed_dsa.megatron.adapters import base_of
from mindspeed_dsa.megatron.dsa import uses_dsa
from mindspeed_dsa.megatron.gathered_weights import wait_for_weights
from mindspeed_dsa.megatron.local_modules import norm_of_fused_layer
from mindspeed_dsa.megatron.mla_projections import Projections, Rotate, derived_by


def build_with_dsa(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``MLASelfAttention.__init__`` to build a DSA core attention, whatever the spec says."""

    # Not done in spec functions: these releases call them without the configuration, and custom specs must
    # work as well.
    def __init__(self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        if not uses_dsa(config):
            original(self, config, submodules, *args, **kwargs)
            return
        problems = problems_of(config)
        if problems:
            raise ValueError("mindspeed_dsa: dsa-backport: " + "; ".join(problems))
        spec = core_attention_spec(context.options, context.megatron)
        submodules = dataclasses.replace(submodules, core_attention=spec)
        original(self, config, submodules, *args, **kwargs)
        # MLA's own checkpoint calls the core attention again without the indexer's inputs. The DSA core
        # attention has its own recomputation.
        self.checkpoint_core_attention = False
        if not config.sequence_parallel and hasattr(self, "q_layernorm"):
            # Each rank has the full gradient, but Megatron sums parameters with this name over ranks.
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True

    return __init__


def derive_for_dsa(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``MLASelfAttention.get_query_key_value_tensors`` to compute the indexer's inputs as well."""

    def derive(layer: Any, hidden_states: Tensor, packed_seq_params: Any, generates: bool) -> Any:
        if not uses_dsa(layer.config):
            return None
        if generates:
            raise ValueError(
                "dsa-backport: DSA trains and evaluates whole sequences on this Megatron; got an inference "
                "context. Generate with Megatron-core 0.16 or later"
            )
        projections = Projections(layer, context.megatron).on(packed_seq_params, hidden_states)
        return _derive(projections, hidden_states, context.options)

    return derived_by(original, derive)


def _derive(
    projections: Projections, hidden_states: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value, and set the core attention's indexer inputs."""
    # Per head: query and key [s, b, heads, dim], value [s, b, heads, value_dim]. Absorbed: key [s, b, 1,
    # latent + rope], and the value is the up-projection [heads, value_dim, latent].
    attention, config = projections.layer, projections.layer.config

    def latent_query_of_own_rows() -> Tensor:
        if config.q_lora_rank is None:
            return hidden_states
        (latent_query,) = projections.down(attention.linear_q_down_proj, hidden_states, [config.q_lora_rank])
        return projections.own_part(latent_query, hidden_states)

    sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
    latent, rotary_key = projections.down(attention.linear_kv_down_proj, hidden_states, sizes)
    latent = projections.own_part(latent, hidden_states)  # [s, b, latent], the shard's tokens
    exchange = key_exchange(
        attention.core_attention, options.dsa, projections.megatron, projections.documents
    )
    # First, because this waits for the layer's gathered weights, which may include the key's norm.
    keeps_heads = exchange is None and by_head_is_faster(projections, hidden_states, options.dsa)
    up = up_projections(projections) if options.dsa.absorb and not keeps_heads else None
    started = None
    if exchange is not None and up is not None:
        started = _start_with_key(projections, latent, rotary_key, hidden_states, exchange)
    latent_query = latent_query_of_own_rows()
    _hand_over(attention, hidden_states, latent_query)

    def normed(latent_query: Tensor) -> Tensor:
        return latent_query if config.q_lora_rank is None else attention.q_layernorm(latent_query)

    if exchange is not None and up is not None:
        up_key, up_value = up
        rotate = projections.rotation(hidden_states.size(0) * exchange.parts)
        query, key = query_beside_key(
            projections,
            started,
            lambda latent_query, up_key: projections.absorbed_query(rotate, normed(latent_query), up_key),
            latent_query,
            up_key,
        )
        return query, key, up_value

    rotary_key = projections.rotary_key_for_all_heads(rotary_key, hidden_states)
    rotate = projections.rotation(rotary_key.size(0))
    if up is not None:
        up_key, up_value = up

        def absorbed(latent_query: Tensor, latent: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
            latent = attention.kv_layernorm(latent)
            absorbed_parts = projections.absorbed_query_and_key(rotate, normed(latent_query), latent, *parts)
            return query_and_key(*absorbed_parts)

        query, key = projections.recomputed_if_asked(absorbed, latent_query, latent, rotary_key, up_key)
        return query, key, up_value

    def by_head(latent_query: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _by_head(projections, rotate, normed(latent_query), *parts)

    query, key, value = projections.recomputed_if_asked(by_head, latent_query, latent, rotary_key)
    return query, key, value


def _start_with_key(
    projections: Projections, latent: Tensor, rotary_key: Tensor, hidden_states: Tensor, exchange: KeyExchange
) -> Tensor | None:
    """Start the all-gather of the absorbed key over context parallel ranks; see :func:`start_with_key`."""
    rotate = projections.rotation(hidden_states.size(0) * exchange.parts, exchange.own_part)
    latent = projections.layer.kv_layernorm(latent)
    key = projections.own_absorbed_key(rotate, latent, rotary_key, hidden_states, is_summed=False)
    return start_with_key(projections, exchange, key)


def _by_head(
    projections: Projections,
    rotate: Rotate,
    latent_query: Tensor,
    latent: Tensor,
    rotary_key: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query and key ``[s, b, heads, qk_head_dim + rope]``, value ``[s, b, heads, value_dim]``."""
    attention = projections.layer
    config, heads = attention.config, attention.num_attention_heads_per_partition
    plain, rotary = projections.query_parts(latent_query)  # [s, b, heads, qk_head_dim], [s, b, heads, rope]
    query = torch.cat([plain, rotate(rotary)], dim=-1)
    key_value, _ = attention.linear_kv_up_proj(attention.kv_layernorm(latent))
    # [s, b, heads * (qk_head_dim + value_dim)] -> [s, b, heads, qk_head_dim], [s, b, heads, value_dim]
    key, value = key_value.unflatten(-1, (heads, -1)).split([config.qk_head_dim, config.v_head_dim], dim=-1)
    # [s, b, rope] -> [s, b, heads, rope]: all heads share the rotary key
    shared = rotate(rotary_key.unsqueeze(2)).expand(-1, -1, heads, -1)
    return query, torch.cat([key, shared], dim=-1), value.contiguous()


def _hand_over(attention: Any, hidden_states: Tensor, latent_query: Tensor) -> None:
    """Set the indexer inputs for the core attention's next call."""
    config = attention.config
    if config.dsa_indexer_normalised_query and config.q_lora_rank is not None:
        # The indexer does not train the model: no gradient for the norm.
        with torch.no_grad():
            latent_query = attention.q_layernorm(latent_query)
            up_projection = base_of(attention.linear_q_up_proj)
            if hasattr(up_projection, "layer_norm_weight"):
                wait_for_weights(up_projection)  # not gathered yet: it is called later
                latent_query = norm_of_fused_layer(up_projection, latent_query, config)
    attention.core_attention.hand_over(hidden_states, latent_query)
