"""Patches of Megatron's dense attention: our attention operator, context parallelism, and MLA latents.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.algorithms import registered
from mindspeed_dsa.context_parallel.packs import BalancedBlocks, PackRows
from mindspeed_dsa.context_parallel.strategy import ContextParallelStrategy, Exchanged
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.attention.context_parallel.dense import DenseAttention, FromLatents, Payload
from mindspeed_dsa.features.attention.context_parallel.feature import DEFAULT, NO_DEAL, Options
from mindspeed_dsa.features.attention.context_parallel.head_exchange import HeadExchange, SharedMembers
from mindspeed_dsa.features.attention.context_parallel.query_parts import (
    attend_in_parts,
    beside_latents,
    parts_of,
)
from mindspeed_dsa.features.attention.context_parallel.ring import (
    PackedRows,
    PayloadStrategy,
    Ring,
    ring_attention,
)
from mindspeed_dsa.megatron.mla_projections import Projections, derived_by
from mindspeed_dsa.ops.dense_attention import takes_parts
from mindspeed_dsa.parallel.groups import subgroup
from mindspeed_dsa.patches.errors import SettingsError

_WHO = "dense-context-parallel"
_SIZES_OF_LATENT_ATTENTION = ("k_channels", "v_channels")


@dataclass(frozen=True)
class Plan:
    """Attention operator and context parallel strategy of one layer.

    Attributes:
        inner: attention operator of a single rank.
        strategy: context parallel strategy of the layer; None on a single rank.
    """

    inner: DenseAttention
    strategy: ContextParallelStrategy | None

    @property
    def takes_payload(self) -> bool:
        """Return whether the layer accepts a :class:`Payload`, such as latents, for keys and values."""
        return self.strategy is None or isinstance(self.strategy, PayloadStrategy)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute causal attention. Query, key and value are ``[s, b, heads, dim]``, as in Megatron."""
        if self.strategy is not None:
            return self.strategy.attend(self.inner, query, key, value)
        positions = None
        if key.size(0) != query.size(0):  # keys of a cache come first
            positions = torch.arange(key.size(0) - query.size(0), key.size(0))
        return self.inner(Exchanged(query, key, value, positions))

    def attend_to_latents(self, query: Tensor, payload: Payload) -> Tensor:
        """Compute causal attention to keys and values that are expanded from MLA latents."""
        if self.strategy is None:
            return ring_attention(self.inner, query, payload, None)
        assert isinstance(self.strategy, PayloadStrategy)
        return self.strategy.attend_payload(self.inner, query, payload)

    def attend_to_documents(self, query: Tensor, payload: Payload, packed_seq_params: Any) -> Tensor:
        """Attend within packed documents under context parallelism.

        Raises:
            ValueError: the layer's strategy or rotary embedding supports whole sequences only.
        """
        if not isinstance(self.strategy, PayloadStrategy):
            raise ValueError(
                f"{_WHO}: {type(self.strategy).__name__} takes whole sequences, and a batch came with packed "
                "ones; use megatron_cp_algo, ulysses_cp_algo or hybrid_cp_algo"
            )
        rows = PackRows.of(packed_seq_params, query.size(0), self.strategy.group)
        assert rows.layout is not None
        # Without latents, Megatron rotates keys by Transformer Engine's layout of documents, not by this one.
        if isinstance(rows.layout, BalancedBlocks) and not isinstance(payload.expansion, FromLatents):
            raise ValueError(f"{_WHO}: {NO_DEAL}")
        return self.strategy.attend_payload(self.inner, query, payload, PackedRows(rows.pack, rows.layout))


def plan_of(core_attention: Any) -> Plan | None:
    """Return the plan stored in a layer, or None if the layer uses Megatron's own attention."""
    return getattr(core_attention, "dense_context_parallel_plan", None)


def build_for_context_parallel(
    original: Callable[..., None], context: Context[Options]
) -> Callable[..., None]:
    """Decorate ``DotProductAttention.__init__`` to accept context parallelism and store a :class:`Plan`."""
    accepted = inspect.signature(original).parameters

    def __init__(
        self: Any,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Latent attention passes head sizes that this class does not accept in every release.
        extra = [name for name in _SIZES_OF_LATENT_ATTENTION if name in kwargs and name not in accepted]
        for name in extra:
            del kwargs[name]
        ranks = config.context_parallel_size
        # The original asserts one context parallel rank. The real value is restored below.
        config.context_parallel_size = 1
        try:
            original(self, config, layer_number, attn_mask_type, attention_type, *args, **kwargs)
        finally:
            config.context_parallel_size = ranks
        if ranks == 1 and not extra:
            return
        problem = unsupported_attention(self, attention_type)
        if problem is not None:
            raise SettingsError(f"{_WHO}: {problem}")
        strategy = None
        if ranks > 1:
            strategy = make_strategy(self, layer_number, kwargs.get("cp_comm_type"), context)
        self.dense_context_parallel_plan = Plan(DenseAttention(scale_of(self)), strategy)

    return __init__


def scale_of(attention: Any) -> float:
    """Return the softmax scale of a ``DotProductAttention``."""
    # With --apply-query-key-layer-scaling the score scale is divided by the layer number, and the softmax
    # multiplies by it again.
    return float(attention.softmax_scale * (attention.scale_mask_softmax.scale or 1.0))


def unsupported_attention(attention: Any, attention_type: str) -> str | None:
    """Return the reason why our operator cannot replace a ``DotProductAttention``, or None.

    Checks the built module, because its configuration can differ from the job's arguments.
    """
    if attention_type != "self" or attention.attn_mask_type.name != "causal":
        kind = f"{attention_type} attention with the mask type {attention.attn_mask_type.name}"
        return f"{kind} is not causal self attention, the only one that this feature has"
    if attention.attention_dropout.p > 0:
        return "attention_dropout is not supported; set it to 0"
    if getattr(attention.scale_mask_softmax, "window_size", None) is not None:
        return "window_size is not supported; every row sees all earlier keys"
    if getattr(attention, "softmax_offset", None) is not None:
        return "softmax_type is not supported; use 'vanilla'"
    return None


def attend_with_other_ranks(original: Callable[..., Tensor], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``DotProductAttention.forward`` to run the operator and strategy of the layer's plan."""

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        plan = plan_of(self)
        # Without context parallelism, packs are handled by pack-documents.
        if plan is None or (plan.strategy is None and packed_seq_params is not None):
            options = (attention_mask, attn_mask_type, attention_bias, packed_seq_params)
            return original(self, query, key, value, *options, **kwargs)
        _require_plain(context.feature, attention_mask, attention_bias)
        latents = None
        # For latent attention, `value` is the weight of the up-projection, which has 2 dimensions: see
        # :func:`project_latents`.
        if value.dim() == 2:
            config = self.config
            expansion = FromLatents(query.size(2), config.kv_lora_rank, config.qk_head_dim)
            key, query_rope = parts_of(config, query, key)
            if query_rope is not None:
                return attend_in_parts(plan.inner, query, query_rope, key, expansion, value).flatten(2)
            latents = Payload(key, expansion, (value,))
        elif query.dim() == 3:  # packed, without a batch dimension
            # [t, heads, dim] -> [t, 1, heads, dim]
            query, key, value = (states.unsqueeze(1) for states in (query, key, value))
        if plan.strategy is not None and key.size(0) != query.size(0):
            raise ValueError(
                f"{_WHO}: {query.size(0)} queries came with {key.size(0)} keys, as in generation with a "
                "key-value cache; context parallel ranks share whole sequences, generate with "
                "--context-parallel-size 1"
            )
        if packed_seq_params is not None:
            out = plan.attend_to_documents(query, latents or Payload.of(key, value), packed_seq_params)
        elif latents is not None:
            out = plan.attend_to_latents(query, latents)
        else:
            out = plan.attend(query, key, value)
        return out.flatten(2)  # [s, b, heads * value_dim]

    return forward


def _require_plain(who: str, mask: Tensor | None, bias: Tensor | None) -> None:
    refused = {
        "an attention mask": (mask, "pass None, or add --no-create-attention-mask-in-dataloader"),
        "an attention bias": (bias, "pass None"),
    }
    for what, (tensor, instead) in refused.items():
        if tensor is not None:
            raise ValueError(f"{who}: {what} came with a batch, and attention here is causal; {instead}")


def build_for_the_operator(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``DotProductAttention.__init__`` to store a plan that attends with our operator.

    Unsupported layers, such as cross attention, keep Megatron's attention, and a warning is logged once.
    """

    def __init__(
        self: Any,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(self, config, layer_number, attn_mask_type, attention_type, *args, **kwargs)
        problem = unsupported_attention(self, attention_type)
        if problem is not None:
            context.log.warning("a layer keeps Megatron's attention, with all scores: %s", problem, once=True)
            return
        self.dense_context_parallel_plan = Plan(DenseAttention(scale_of(self)), None)

    return __init__


def project_latents(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``MLASelfAttention.get_query_key_value_tensors`` to return latents in place of keys.

    Megatron's keys and values are kept for generation, for packed sequences without context parallelism, and
    for strategies that only accept keys and values.
    """
    return _project(original, context, 5)


def project_latents_in_three(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Like :func:`project_latents`, before Megatron-core 0.16: return only the first three tensors."""
    return _project(original, context, 3)


def _project(original: Callable[..., Any], context: Context[Options], results: int) -> Callable[..., Any]:
    def derive(layer: Any, hidden_states: Tensor, packed_seq_params: Any, generates: bool) -> Any:
        plan = plan_of(layer.core_attention)
        if plan is None or not plan.takes_payload or generates:
            return None
        # On one rank, Megatron's form goes to pack-documents, which attends document by document.
        if plan.strategy is None and packed_seq_params is not None:
            return None
        projections = Projections(layer, context.megatron).on(packed_seq_params, hidden_states)
        return query_and_latents(projections, hidden_states, plan.strategy is None)[:results]

    return derived_by(original, derive)


def query_and_latents(projections: Projections, hidden_states: Tensor, is_alone: bool) -> tuple[Tensor, ...]:
    """Return the result of ``get_query_key_value_tensors`` with latents in place of keys.

    The latent query and key-value are shards of the sequence under sequence parallelism.

    Args:
        projections: projections of an ``MLASelfAttention``.
        hidden_states: ``[s, b, hidden]``, a rank's shard of the sequence under sequence parallelism.
        is_alone: whether there is only one context parallel rank.

    Returns:
        Tuple of five tensors: query ``[s, b, heads, qk_head_dim + rope]``, latents with the rotated key ``[s,
        b, 1, latent + rope]``, the up-projection's weight ``[heads * (qk_head_dim + value_dim), latent]``,
        the latent query and the latent key-value. If the operator takes the rotary dimensions separately (one
        rank only), the first two come from :func:`.query_parts.beside_latents`.
    """
    latent_query = projections.latent_query(hidden_states)
    latent, rotary_key = projections.latent_key(hidden_states)
    rotary_key = projections.rotary_key_for_all_heads(rotary_key, hidden_states)
    rotate = projections.rotation(rotary_key.size(0))
    weight = projections.up_projection("dense-context-parallel", "use Transformer Engine's attention")

    def derive(latent_query: Tensor, latent: Tensor, rotary_key: Tensor) -> tuple[Tensor, Tensor]:
        # [s, b, heads, qk_head_dim], [s, b, heads, rope]
        plain, rotary = projections.query_parts(latent_query)
        rotary, key = rotate(rotary), projections.whole_latent_key(rotate, latent, rotary_key)
        if is_alone and takes_parts(plain, rotary.size(-1), projections.layer.config.v_head_dim):
            return beside_latents(plain, rotary, key)
        return torch.cat([plain, rotary], dim=-1), key

    query, key = projections.recomputed_if_asked(derive, latent_query, latent, rotary_key)
    return query, key, weight, latent_query, latent


# -- strategies of layers, and the process groups that they exchange in -----------------------------------


class _Shared:
    """Process groups and :class:`SharedMembers`, shared by all layers of a session."""

    def __init__(self, context: Context[Options]) -> None:
        # By context parallel group: number of ranks that exchange heads, their group, and the ring's group.
        self.levels: WeakKeyDictionary[ProcessGroup, tuple[int, ProcessGroup, ProcessGroup]]
        self.levels, self.members = WeakKeyDictionary(), SharedMembers()


def make_strategy(
    attention: Any, layer_number: int, comm_type: str | None, context: Context[Options]
) -> ContextParallelStrategy:
    """Build the context parallel strategy of a layer.

    Args:
        attention: Megatron's core attention.
        layer_number: number of the layer, from 1.
        comm_type: ``cp_comm_type`` of this layer in Megatron's configuration, used if no flag is set.
        context: context of the feature.

    Raises:
        SettingsError: dense attention does not support the selected algorithm.
    """
    group = _context_parallel_group(attention, context.megatron)
    # Megatron's configuration spells it all_gather, our names allgather.
    name = context.options.of_layer(layer_number, (comm_type or DEFAULT).replace("_", ""))
    registered_strategy = registered(name)
    if registered_strategy is not None:
        return registered_strategy(group)
    if name == "p2p":
        return Ring(group)
    if name == "a2a":
        return HeadExchange(group, shared=context.state(_Shared).members)
    if name == "a2a+p2p":
        levels = _neighbours_and_ring(attention, group, context)
        return HeadExchange(group, *levels, context.state(_Shared).members)
    raise SettingsError(
        f"{context.feature}: layer {layer_number} has dense attention, for which there is no {name}; use "
        "p2p, a2a or a2a+p2p"
    )


def _groups_of_layer(attention: Any) -> Any:
    """Return the layer's groups: ``pg_collection`` since 0.15, ``model_comm_pgs`` in 0.13 and 0.14."""
    return getattr(attention, "pg_collection", None) or getattr(attention, "model_comm_pgs", None)


def _context_parallel_group(attention: Any, megatron: Megatron) -> ProcessGroup:
    group = getattr(_groups_of_layer(attention), "cp", None)
    if group is None:
        group = megatron("core.parallel_state").get_context_parallel_group()
    return group  # type: ignore[no-any-return]


def _neighbours_and_ring(
    attention: Any, group: ProcessGroup, context: Context[Options]
) -> tuple[ProcessGroup, ProcessGroup]:
    """Return the head exchange group and the ring group: Megatron's if the sizes match, or our own."""
    levels = getattr(_groups_of_layer(attention), "hcp", None)
    find = getattr(context.megatron("core.parallel_state"), "get_hierarchical_context_parallel_groups", None)
    if levels is None and find is not None:
        # Without --ulysses-degree-in-cp, take the first level of Megatron's hierarchy.
        levels = find(check_initialized=False)
    degree = context.options.ulysses_degree or (levels[0].size() if levels else 0)
    if not degree or group.size() % degree:
        raise SettingsError(
            f"dense-context-parallel: hybrid_cp_algo over {group.size()} ranks needs --ulysses-degree-in-cp, "
            "a divisor of that"
        )
    sizes = [degree, group.size() // degree]
    if levels and [level.size() for level in levels] == sizes:
        return levels[0], levels[1]
    built = context.state(_Shared).levels
    if group not in built or built[group][0] != degree:
        ranks, rank = dist.get_process_group_ranks(group), group.rank()
        # With 8 ranks and degree 2: rank 5 has neighbours 4, 5 and the ring 1, 3, 5, 7.
        first = rank - rank % degree
        # Only members create the group: every context parallel rank builds the same layers in the same order.
        neighbours = subgroup(group, ranks[first : first + degree])
        built[group] = degree, neighbours, subgroup(group, ranks[rank % degree :: degree])
    return built[group][1:]


class _FromOne(list[str]):
    """List indexed by layer number, from 1. Numbers beyond its end return the last entry."""

    def __getitem__(self, number: Any) -> Any:
        return super().__getitem__(min(number, len(self)) - 1)


def count_layers_from_one(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerLayer.__init__`` to index ``cp_comm_type`` by 1-based layer number.

    Megatron passes its 1-based number to a list that is indexed from 0.
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        names = config.cp_comm_type
        if not isinstance(names, list):
            original(self, config, *args, **kwargs)
            return
        config.cp_comm_type = _FromOne(names)
        try:
            original(self, config, *args, **kwargs)
        finally:
            config.cp_comm_type = names

    return __init__
