"""Absorbed form of MLA: heads share the latent key, and the up-projections act on query and output.

The key's up-projection moves to the query, ``(W_UK c) . q = c . (W_UK^T q)``. The value's moves to the
attention output, ``sum_s p_s (W_UV c_s) = W_UV (sum_s p_s c_s)``. All heads then share one key: the latent
``c`` and the rotary dimensions. The latent is also the value (DeepSeek-V2 paper, section 2.1). Parameters are
unchanged.

Imports Megatron only when called, because these functions are loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa import log
from mindspeed_dsa.context_parallel.key_exchange import KeyExchange
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.key_exchange.exchange import key_exchange
from mindspeed_dsa.features.dsa.key_exchange.layers import recomputes
from mindspeed_dsa.features.dsa.operands import keeps_parts_apart, query_and_key
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.megatron.mla_projections import Projections, derived_by, steps_of
from mindspeed_dsa.ops.sparse_flash_attention.by_head import is_faster_by_head


def absorb_latent(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``MLASelfAttention.get_query_key_value_tensors`` to return the absorbed form in DSA models.

    Generation with a cache keeps Megatron's per-head form. On a single context parallel rank, two more cases
    keep the per-head form: training stages with dense attention, where it needs a third of the work, and
    calls for which :func:`by_head_is_faster` returns True. mcore-bridge's subclass of ``MLASelfAttention``
    gets the rotary angles from its model.
    """

    def get_query_key_value_tensors(
        self: Any, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any
    ) -> Any:
        def derive(layer: Any, hidden_states: Tensor, packed_seq_params: Any, generates: bool) -> Any:
            options = context.options
            if generates or layer.config.experimental_attention_variant != "dsa":
                return None
            projections = Projections(layer, context.megatron, angles=rotary_pos_emb)
            projections = projections.on(packed_seq_params, hidden_states)
            exchange = key_exchange(layer.core_attention, options, context.megatron, projections.documents)
            if exchange is not None:
                return absorbed_query_and_shared_key(projections, hidden_states, exchange)
            if options.attends_densely or by_head_is_faster(projections, hidden_states, options):
                return None
            return absorbed_query_key_value(projections, hidden_states)

        given = {} if rotary_pos_emb is None else {"rotary_pos_emb": rotary_pos_emb}
        return derived_by(partial(original, **given), derive)(self, hidden_states, *args, **kwargs)

    return get_query_key_value_tensors


def by_head_is_faster(projections: Projections, hidden_states: Tensor, options: Options) -> bool:
    """Return whether per-head attention is faster than absorbed, under ``--use-dsa-absorb auto``.

    Always False if the indexer loss is computed in the attention's backward, which the per-head operator does
    not support. Also False for packed documents, and with Megatron's own attention, which computes all
    query-key pairs in either form.

    Args:
        projections: projections of an ``MLASelfAttention``.
        hidden_states: ``[s, b, hidden]``, a rank's shard of the sequence under sequence parallelism.
        options: options that choose the parts of DSA that run on our operators.
    """
    if options.absorb_always or not options.attention or projections.documents is not None:
        return False
    config, rows = projections.layer.config, projections.rows(hidden_states)
    topk = config.dsa_indexer_topk
    rope, latent = config.qk_pos_emb_head_dim, config.kv_lora_rank
    # Multiply-adds per query, key and head: per head q.k + p.v, e.g. 128 + 64 + 128 = 320; absorbed
    # 512 + 64 + 512 = 1088.
    widths = (config.qk_head_dim + rope + config.v_head_dim, latent + rope + latent)
    heads = projections.layer.num_attention_heads_per_partition
    faster = is_faster_by_head(hidden_states.device, rows, topk, heads, widths, options.backend)
    # Up to topk rows attention is dense, and its backward does not compute the loss anyway.
    by_head = faster and not (options.fuse_kl_in_backward and rows > topk)
    log.get("dsa-absorb", projections.megatron.root).info(
        "sequences of %d tokens attend %s", rows, "by head" if by_head else "in absorbed form", once=True
    )
    return by_head


def absorbed_query_key_value(projections: Projections, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """Return the result of ``get_query_key_value_tensors`` in absorbed form.

    Query and key come from :func:`query_and_key`, which can move the query's rotary dimensions to the key.
    Under sequence parallelism, the latent query and key-value are shards of the sequence. Packed documents
    have a batch of 1.

    Args:
        projections: projections of an ``MLASelfAttention``.
        hidden_states: ``[s, b, hidden]``, a rank's shard of the sequence under sequence parallelism.

    Returns:
        Query ``[s, b, heads, latent + rope]``, key ``[s, b, 1, latent + rope]``, the value's up-projection
        ``[heads, value_dim, latent]``, latent query ``[s, b, q_lora_rank]`` and latent key-value
        ``[s, b, latent]``.
    """
    attention = projections.layer
    up_key, up_value = up_projections(projections)
    steps = steps_of(attention) if projections.documents is None else None
    if steps is not None and (derived := steps.prolog(attention, hidden_states, up_key)) is not None:
        query, key, latent_query, latent = derived
        return query, key, up_value, latent_query, latent
    latent_query = projections.latent_query(hidden_states)  # [s, b, q_lora_rank]
    latent, rotary_key = projections.latent_key(hidden_states)  # [s, b, latent], [s, b, rope]
    # is_summed: the repair rotary-key-tp-grads sums this gradient over tensor parallel ranks.
    rotary_key = projections.rotary_key_for_all_heads(rotary_key, hidden_states, is_summed=True)
    rotate = projections.rotation(rotary_key.size(0))
    query, key = projections.recomputed_if_asked(
        lambda *parts: query_and_key(*projections.absorbed_query_and_key(rotate, *parts)),
        latent_query,
        latent,
        rotary_key,
        up_key,
    )
    return query, key, up_value, latent_query, latent


def absorbed_query_and_shared_key(
    projections: Projections, hidden_states: Tensor, exchange: KeyExchange
) -> tuple[Tensor, ...]:
    """Like :func:`absorbed_query_key_value`, but for context parallelism.

    The latent key of this rank's tokens is computed first, and its all-gather overlaps with the query's
    projection. Query and key come from :func:`query_beside_key`.
    """
    # First, because this waits for the layer's gathered weights, which may include the key's norm.
    up_key, up_value = up_projections(projections)
    latent, rotary_key = projections.latent_key(hidden_states)
    rows = hidden_states.size(0) * exchange.parts
    key = projections.own_absorbed_key(
        # is_summed: the repair rotary-key-tp-grads sums this gradient over tensor parallel ranks.
        projections.rotation(rows, exchange.own_part),
        latent,
        rotary_key,
        hidden_states,
        is_summed=True,
    )
    started = start_with_key(projections, exchange, key)
    latent_query = projections.latent_query(hidden_states)
    rotate = projections.rotation(rows)
    query = query_beside_key(
        projections,
        started,
        lambda *parts: projections.absorbed_query(rotate, *parts),
        latent_query,
        up_key,
    )
    return *query, up_value, latent_query, latent


def start_with_key(
    projections: Projections, exchange: KeyExchange, key: tuple[Tensor, Tensor]
) -> Tensor | None:
    """Start the all-gather of a layer's key over context parallel ranks.

    The key is gathered as two tensors, latent and rotary, if the device's operators take them separately.

    Args:
        projections: projections of the layer.
        exchange: key exchange of the layer.
        key: latent and rotary dimensions of the key, ``[s, b, 1, dim]`` each.

    Returns:
        Placeholder to pass as the core attention's ``key`` argument. None if two tensors are gathered: the
        caller then passes the query's rotary dimensions as ``key``.
    """
    # A recomputed core attention needs one piece: a gather in flight cannot be recomputed, and Megatron's
    # checkpoint has one argument for the gathered key.
    if keeps_parts_apart(key[0].device) and not recomputes(projections.layer.config):
        exchange.hand_over(*key)
        return None
    return exchange.hand_over(torch.cat(key, dim=-1))


def query_beside_key(
    projections: Projections,
    started: Tensor | None,
    derive: Callable[..., tuple[Tensor, Tensor]],
    *parts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the query during the key's all-gather; return the core attention's query and key arguments.

    Args:
        projections: projections of the layer.
        started: result of :func:`start_with_key`.
        derive: function that returns the latent and rotary dimensions of the query, ``[s, b, heads, dim]``
            each.
        *parts: arguments of ``derive``.

    Returns:
        The query and ``started``. If ``started`` is None: the query's latent dimensions, and the rotary
        dimensions of all heads as key, ``[s, b, 1, heads * rope]``.
    """

    def in_form(*parts: Tensor) -> tuple[Tensor, ...]:
        latent, rope = derive(*parts)
        if started is not None:
            return (torch.cat([latent, rope], dim=-1),)  # [s, b, heads, latent + rope]
        # Contiguous here, so that Megatron's layer makes no copy: recomputation discards this tensor.
        return latent.contiguous(), rope.flatten(2).unsqueeze(2)  # [s, b, 1, heads * rope]

    query, *of_query = projections.recomputed_if_asked(in_form, *parts)
    return query, of_query[0] if started is None else started


def up_projections(projections: Projections) -> tuple[Tensor, Tensor]:
    """Return the up-projections of key and value; see :meth:`.Projections.up_projections`."""
    return projections.up_projections("dsa-absorb", "add --no-use-dsa-absorb")
