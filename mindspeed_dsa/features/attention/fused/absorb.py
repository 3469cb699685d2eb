"""MLA in absorbed form: the key's up-projection moves to the query, the value's behind the attention.

``(W_UK c) . q = c . (W_UK^T q)`` and ``sum_s p_s (W_UV c_s) = W_UV (sum_s p_s c_s)``, so that all heads share
one key, the latent ``c`` with its rotary part, whose latent part is the value as well (DeepSeek-V2 paper,
section 2.1). Parameters stay where they are.

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.features.attention.fused import options
from mindspeed_dsa.features.attention.local_norms import norm_of_fused_layer
from mindspeed_dsa.features.attention.rotary_key_tp_grads_impl import SumGradients
from mindspeed_dsa.features.host import host


def absorb_latent(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MLASelfAttention.get_query_key_value_tensors`` for training and evaluation of DSA models.

    Generation with a cache and packed sequences keep Megatron's form. So does the warm-up stage, whose
    dense attention costs a third in it.
    """

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
        plain = options.current().warmup or self.config.experimental_attention_variant != "dsa"
        given = (packed_seq_params, inference_context, *args, *kwargs.values())
        if plain or any(one is not None for one in given):
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
        return absorbed_query_key_value(self, hidden_states)

    return get_query_key_value_tensors


def absorbed_query_key_value(attention: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """What ``get_query_key_value_tensors`` returns, in absorbed form.

    Args:
        attention: Megatron's ``MLASelfAttention``.
        hidden_states: ``[s, b, hidden]``, a rank's part of the sequence under sequence parallelism.

    Returns:
        query ``[s, b, heads, latent + rope]``, key ``[s, b, 1, latent + rope]``, the value's up-projection
        ``[heads, value_dim, latent]``, the latent query ``[s, b, q_lora_rank]`` and the latent key-value
        ``[s, b, latent]`` (both parts of the sequence under sequence parallelism).
    """
    config = attention.config
    rotary, mscale = _rotary(attention, hidden_states)
    latent_query = hidden_states
    if config.q_lora_rank is not None:
        latent_query = _whole(attention, attention.linear_q_down_proj(hidden_states)[0], config.q_lora_rank)
        latent_query = attention.q_layernorm(_part(attention, attention.linear_q_down_proj, latent_query))
    sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
    combined = _whole(attention, attention.linear_kv_down_proj(hidden_states)[0], sum(sizes))
    latent, rotary_key = combined.split(sizes, dim=-1)
    latent = attention.kv_layernorm(_part(attention, attention.linear_kv_down_proj, latent))
    if config.sequence_parallel and not _is_split(attention.linear_kv_down_proj, sum(sizes)):
        rotary_key = _gathered(attention, rotary_key)
    up_key, up_value = up_projections(attention)

    def project(
        latent_query: Tensor, latent: Tensor, rotary_key: Tensor, up_key: Tensor
    ) -> tuple[Tensor, Tensor]:
        return _project(attention, latent_query, latent, rotary_key, up_key, rotary, mscale)

    operands = latent_query, latent, rotary_key, up_key
    if attention.recompute_up_proj:
        checkpoint = host("core.tensor_parallel").CheckpointWithoutOutput(fp8=config.fp8 or config.fp4)
        query, key = checkpoint.checkpoint(project, *operands)
        attention.qkv_up_checkpoint = checkpoint
    else:
        query, key = project(*operands)
    return query, key, up_value, latent_query, latent


def _project(
    attention: Any,
    latent_query: Tensor,
    latent: Tensor,
    rotary_key: Tensor,
    up_key: Tensor,
    rotary: Tensor,
    mscale: float,
) -> tuple[Tensor, Tensor]:
    """Query and key in absorbed form, from what the down-projections made."""
    config = attention.config
    projection = attention.linear_q_proj if config.q_lora_rank is None else attention.linear_q_up_proj
    query, _ = projection(latent_query)
    query = query.unflatten(-1, (attention.num_attention_heads_per_partition, attention.q_head_dim))
    query, rotary_query = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)

    def rotate(states: Tensor) -> Tensor:
        embeddings = host("core.models.common.embeddings")
        return embeddings.apply_rotary_pos_emb(  # type: ignore[no-any-return]
            states,
            rotary[: states.shape[0]],
            config=config,
            cu_seqlens=None,
            mscale=mscale,
            cp_group=attention.pg_collection.cp,
        )

    # [s, b, heads, qk_head_dim] x [heads, qk_head_dim, latent]
    absorbed = torch.einsum("sbhd,hdc->sbhc", query, up_key)
    query = torch.cat([absorbed, rotate(rotary_query)], dim=-1)
    if hasattr(attention.linear_kv_up_proj, "layer_norm_weight"):
        latent = norm_of_fused_layer(attention.linear_kv_up_proj, latent, config)
    # Every head of every rank reads the same key: its gradients are summed over ranks.
    if config.sequence_parallel:
        latent = _gathered(attention, latent)
    elif attention.pg_collection.tp.size() > 1:
        latent = SumGradients.apply(latent, attention.pg_collection.tp)
    key = torch.cat([latent.unsqueeze(2), rotate(rotary_key.unsqueeze(2))], dim=-1)
    return query, key


def up_projections(attention: Any) -> tuple[Tensor, Tensor]:
    """The two halves of the key-value up-projection's weight, by head.

    Returns:
        ``[heads, qk_head_dim, latent]`` and ``[heads, value_dim, latent]``, this rank's heads.

    Raises:
        ValueError: the layer is more than its weight (an adapter, a bias), or keeps it in fp8.
    """
    layer, config = attention.linear_kv_up_proj, attention.config
    # Under overlapped parameter gathering Megatron waits for a layer's weights in this hook, and the layer
    # itself is never called.
    for number, hook in list(layer._forward_pre_hooks.items()):
        hook(layer, (), *([{}] if number in layer._forward_pre_hooks_with_kwargs else []))
    parameters = {name for name, _ in layer.named_parameters()}
    if parameters - {"weight", "layer_norm_weight", "layer_norm_bias"} or "weight" not in parameters:
        raise ValueError(
            f"dsa-absorb: linear_kv_up_proj holds {', '.join(sorted(parameters)) or 'no parameters'}, and "
            "absorption takes a plain weight only; add --no-use-dsa-absorb (LoRA on this layer needs that)"
        )
    if type(layer.weight) not in (torch.nn.Parameter, Tensor):
        raise ValueError(
            f"dsa-absorb: linear_kv_up_proj keeps its weight as {type(layer.weight).__name__}, and "
            "absorption takes plain numbers only; add --no-use-dsa-absorb, or leave --fp8-param-gather away"
        )
    by_head = layer.weight.unflatten(0, (attention.num_attention_heads_per_partition, -1))
    up_key, up_value = by_head.split([config.qk_head_dim, config.v_head_dim], dim=1)
    return up_key, up_value


def _rotary(attention: Any, hidden_states: Tensor) -> tuple[Tensor, float]:
    """Angles ``[s, 1, 1, rope]`` of the whole sequence, and YaRN's magnitude."""
    embedding = attention.rotary_pos_emb
    length = embedding.get_rotary_seq_len(None, None, hidden_states, attention.config, None)
    if attention.config.rope_type == "rope":
        return embedding(length, packed_seq=False), 1.0
    angles, mscale = embedding(length, packed_seq=False)
    return angles, mscale


def _is_split(projection: Any, width: int) -> bool:
    """Whether a down-projection is split over tensor parallel ranks, so that its output is a part."""
    return bool(projection.weight.shape[0] != width)


def _whole(attention: Any, projected: Tensor, width: int) -> Tensor:
    """All ``width`` columns of a down-projection's output; of the whole sequence if it is split."""
    if projected.shape[-1] == width:
        return projected
    gather = host("core.tensor_parallel").gather_from_tensor_model_parallel_region
    return gather(projected, group=attention.pg_collection.tp)  # type: ignore[no-any-return]


def _part(attention: Any, projection: Any, states: Tensor) -> Tensor:
    """This rank's part of the sequence, where sequence parallelism has it and the projection gave all."""
    config = attention.config
    width = config.q_lora_rank
    if projection is attention.linear_kv_down_proj:
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
    if not (config.sequence_parallel and _is_split(projection, width)):
        return states
    scatter = host("core.tensor_parallel").scatter_to_sequence_parallel_region
    return scatter(states, group=attention.pg_collection.tp)  # type: ignore[no-any-return]


def _gathered(attention: Any, states: Tensor) -> Tensor:
    """The whole sequence from its parts; gradients are summed and scattered."""
    gather = host("core.tensor_parallel").gather_from_sequence_parallel_region
    return gather(states, group=attention.pg_collection.tp)  # type: ignore[no-any-return]
