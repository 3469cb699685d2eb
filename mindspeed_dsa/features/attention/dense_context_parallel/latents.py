"""Latents in place of the keys and values of all heads, from hidden states to the core attention.

Imports nothing of Megatron: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.attention.dense_context_parallel.core_attention import plan_of
from mindspeed_dsa.features.attention.dense_context_parallel.feature import Options
from mindspeed_dsa.megatron.mla_projections import Projections, plain_up_projection


def carry_latents(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``MLASelfAttention.get_query_key_value_tensors``.

    Generation keeps Megatron's form, and so do packed sequences on one rank, and strategies that know keys
    and values only.
    """
    return _carry(original, context, 5)


def carry_latents_in_three(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """The same before 0.16, which returns no latents beside query, key and value."""
    return _carry(original, context, 3)


def _carry(original: Callable[..., Any], context: Context[Options], results: int) -> Callable[..., Any]:

    def get_query_key_value_tensors(
        self: Any,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        plan = plan_of(self.core_attention)
        given: tuple[Any, ...] = (inference_context, *args, *kwargs.values())
        if plan is not None and plan.strategy is None:
            given = (packed_seq_params, *given)
        if plan is None or not plan.carries or any(one is not None for one in given):
            return original(
                self,
                hidden_states,
                key_value_states,
                position_ids,
                packed_seq_params,
                inference_context,
                *args,
                **kwargs,
            )
        projections = Projections(self, context.megatron).on(packed_seq_params, hidden_states)
        return query_and_latents(projections, hidden_states)[:results]

    return get_query_key_value_tensors


def query_and_latents(projections: Projections, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """The result of ``get_query_key_value_tensors``, with latents in place of keys.

    Args:
        projections: of an ``MLASelfAttention``.
        hidden_states: ``[s, b, hidden]``, a rank's part of the sequence under sequence parallelism.

    Returns:
        query ``[s, b, heads, qk_head_dim + rope]``, latents and rotated key ``[s, b, 1, latent + rope]``, the
        up-projection's weight ``[heads * (qk_head_dim + value_dim), latent]``, the latent query and the
        latent key-value (both parts of the sequence under sequence parallelism).
    """
    latent_query = projections.latent_query(hidden_states)
    latent, rotary_key = projections.latent_key(hidden_states)
    rotary_key = projections.rotary_key_for_all_heads(rotary_key, hidden_states)
    rotate = projections.rotation(rotary_key.size(0))
    weight = plain_up_projection(
        projections.layer, "dense-context-parallel", "use Transformer Engine's attention"
    )

    def derive(latent_query: Tensor, latent: Tensor, rotary_key: Tensor) -> tuple[Tensor, Tensor]:
        plain, rotary = projections.query_parts(latent_query)
        key = projections.whole_latent_key(rotate, latent, rotary_key)
        return torch.cat([plain, rotate(rotary)], dim=-1), key

    query, key = projections.recomputed_if_asked(derive, latent_query, latent, rotary_key)
    return query, key, weight, latent_query, latent
