"""The steps from hidden states to query and key of latent attention, on any Megatron-core since 0.12.1.

Shapes are Megatron's, sequence first. A down-projection is either a full copy on every tensor parallel rank,
which returns its input's part of the sequence, or split over ranks, and then returns the whole sequence.

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.features.attention.local_norms import norm_of_fused_layer
from mindspeed_dsa.features.attention.rotary_key_tp_grads_impl import SumGradients
from mindspeed_dsa.features.host import host

Rotate = Callable[[Tensor], Tensor]


def tensor_parallel_group(attention: Any) -> ProcessGroup:
    """That of an attention layer: ``pg_collection`` since 0.15, ``model_comm_pgs`` in 0.13 and 0.14."""
    group = _group_of_its_own(attention, "tp")
    return host("core.parallel_state").get_tensor_model_parallel_group() if group is None else group


def context_parallel_group(attention: Any) -> ProcessGroup:
    """That of an attention layer, likewise."""
    group = _group_of_its_own(attention, "cp")
    return host("core.parallel_state").get_context_parallel_group() if group is None else group


def down(attention: Any, projection: Any, hidden_states: Tensor, sizes: list[int]) -> list[Tensor]:
    """A down-projection's output by parts, put together where the projection is split over ranks."""
    projected, _ = projection(hidden_states)
    if projected.size(-1) != sum(sizes):
        gather = host("core.tensor_parallel").gather_from_tensor_model_parallel_region
        projected = gather(projected, **_group_argument(attention))
    return list(projected.split(sizes, dim=-1))


def own_part(attention: Any, states: Tensor, hidden_states: Tensor) -> Tensor:
    """As long as the hidden states: under sequence parallelism, this rank's part."""
    if states.size(0) == hidden_states.size(0):
        return states
    scatter = host("core.tensor_parallel").scatter_to_sequence_parallel_region
    return scatter(states, **_group_argument(attention))  # type: ignore[no-any-return]


def rotary_key_for_all_heads(
    attention: Any, rotary_key: Tensor, hidden_states: Tensor, is_summed: bool = False
) -> Tensor:
    """The rotary key of the whole sequence; its gradient is that of all ranks' heads.

    Megatron lets each rank keep the gradient of its own heads where the projection is split, and without
    sequence parallelism.

    Args:
        attention: Megatron's ``MLASelfAttention``.
        rotary_key: ``[s, b, rope]``, a part of ``s`` from a full copy under sequence parallelism.
        hidden_states: ``[s, b, hidden]``, likewise.
        is_summed: whether something else sums the gradient where no reduce-scatter does.
    """
    group = tensor_parallel_group(attention)
    if group.size() == 1:
        return rotary_key
    if attention.config.sequence_parallel and rotary_key.size(0) == hidden_states.size(0):
        return _gathered(attention, rotary_key)
    if is_summed:
        return rotary_key
    return SumGradients.apply(rotary_key, group)  # type: ignore[no-any-return]


def rotation(attention: Any, length: int) -> Rotate:
    """Applies MLA's rotary embedding to states ``[length, b, heads, rope]``.

    These are a whole sequence, or a context parallel rank's rows of it: the embedding makes the angles of the
    whole sequence and returns those of its rank.
    """
    whole = length * context_parallel_group(attention).size()
    angles, mscale = attention.rotary_pos_emb(whole), 1.0
    if isinstance(angles, tuple):  # YaRN
        angles, mscale = angles

    def rotate(states: Tensor) -> Tensor:
        apply = host("core.models.common.embeddings").apply_rotary_pos_emb
        return apply(states, angles, config=attention.config, mscale=mscale)  # type: ignore[no-any-return]

    return rotate


def query_parts(attention: Any, latent_query: Tensor) -> tuple[Tensor, ...]:
    """``[s, b, heads, qk_head_dim]`` and ``[s, b, heads, rope]``, before rotation."""
    config, heads = attention.config, attention.num_attention_heads_per_partition
    projection = attention.linear_q_proj if config.q_lora_rank is None else attention.linear_q_up_proj
    query, _ = projection(latent_query)
    sizes = [config.qk_head_dim, config.qk_pos_emb_head_dim]
    return query.unflatten(-1, (heads, -1)).split(sizes, dim=-1)  # type: ignore[no-any-return]


def absorbed_query_and_key(
    attention: Any, rotate: Rotate, latent_query: Tensor, latent: Tensor, rotary_key: Tensor, up_key: Tensor
) -> tuple[Tensor, Tensor]:
    """Query and key of the whole sequence in absorbed form.

    Args:
        attention: Megatron's ``MLASelfAttention``.
        rotate: from :func:`rotation`.
        latent_query: ``[s, b, q_lora_rank]``, normed but for a norm that its up-projection holds.
        latent: ``[s, b, kv_lora_rank]``, normed but for a norm that its up-projection holds.
        rotary_key: ``[s, b, rope]``, of the whole sequence.
        up_key: the key's up-projection, ``[heads, qk_head_dim, kv_lora_rank]``.

    Returns:
        ``[s, b, heads, kv_lora_rank + rope]`` and ``[s, b, 1, kv_lora_rank + rope]``.
    """
    plain, rotary = query_parts(attention, latent_query)
    # [s, b, heads, qk_head_dim] x [heads, qk_head_dim, latent]
    query = torch.cat([torch.einsum("sbhd,hdc->sbhc", plain, up_key), rotate(rotary)], dim=-1)
    if hasattr(attention.linear_kv_up_proj, "layer_norm_weight"):
        latent = norm_of_fused_layer(attention.linear_kv_up_proj, latent, attention.config)
    # Every head of every rank reads this one key: its gradients are summed over ranks.
    group = tensor_parallel_group(attention)
    if group.size() > 1:
        if attention.config.sequence_parallel:
            latent = _gathered(attention, latent)
        else:
            latent = SumGradients.apply(latent, group)
    return query, torch.cat([latent.unsqueeze(2), rotate(rotary_key.unsqueeze(2))], dim=-1)


def recomputed_if_asked(attention: Any, derive: Callable[..., Any], *parts: Tensor) -> Any:
    """Run now; with ``mla_up_proj`` among the modules to recompute, the layer discards what is returned."""
    if not getattr(attention, "recompute_up_proj", False):
        return derive(*parts)
    make, config = host("core.tensor_parallel").CheckpointWithoutOutput, attention.config
    quantised = {}
    if "fp8" in inspect.signature(make).parameters:  # since 0.13; None says no, False does not
        quantised["fp8"] = config.fp8 or getattr(config, "fp4", None)
    checkpoint = attention.qkv_up_checkpoint = make(**quantised)
    return checkpoint.checkpoint(derive, *parts)


def _gathered(attention: Any, states: Tensor) -> Tensor:
    """The whole sequence from its parts; gradients are summed and scattered."""
    gather = host("core.tensor_parallel").gather_from_sequence_parallel_region
    return gather(states, group=tensor_parallel_group(attention))  # type: ignore[no-any-return]


def _group_of_its_own(attention: Any, name: str) -> ProcessGroup | None:
    groups = getattr(attention, "pg_collection", None) or getattr(attention, "model_comm_pgs", None)
    return getattr(groups, name, None)


def _group_argument(attention: Any) -> dict[str, ProcessGroup]:
    """Where layers have groups of their own, Megatron's mappings take one; 0.12 knows no such argument."""
    group = _group_of_its_own(attention, "tp")
    return {} if group is None else {"group": group}
