"""Patches for Megatron-core 0.19 beyond the kernel hooks: key exchange and separate rotary dimensions.

Under context parallelism, Megatron's ``DSAttention.forward`` gathers keys with three blocking collectives
before it calls the hooks. Here the all-gather of the latent key already starts in the projections. In
addition, NPU operators take the latent and rotary dimensions of the query as separate tensors, but hooks get
one tensor. On NPUs the projections therefore return separate tensors.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.absorb import absorbed_query_and_shared_key, absorbed_query_key_value
from mindspeed_dsa.features.dsa.call import call_of
from mindspeed_dsa.features.dsa.core_attention import attend, refuse_unknown
from mindspeed_dsa.features.dsa.kernel_hooks.feature import Options
from mindspeed_dsa.features.dsa.key_exchange.exchange import ATTRIBUTE, groups_of, key_exchange
from mindspeed_dsa.features.dsa.key_exchange.layers import (
    mark_gradients_of_own_rows,
    projects_own_rows,
    sum_gradients,
    with_whole_key,
)
from mindspeed_dsa.features.dsa.operands import keeps_parts_apart
from mindspeed_dsa.megatron.dsa import shares_keys
from mindspeed_dsa.megatron.mla_projections import Projections
from mindspeed_dsa.megatron.selection_source import current, place_of


def start_with_the_key(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``AbsorbedMLASelfAttention.get_query_key_value_tensors`` to start the key's all-gather first.

    The all-gather overlaps with the query's projection. Without context parallelism, this applies only on
    devices whose operators take latent and rotary dimensions separately.
    """

    def get_query_key_value_tensors(
        self: Any,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        **kwargs: Any,
    ) -> Any:
        is_alone = groups_of(self.core_attention).cp.size() == 1
        is_ours = keeps_parts_apart(hidden_states.device) if is_alone else _is_dealt_here(packed_seq_params)
        if not (is_ours and shares_keys(self.config, context.options)):
            return original(
                self, hidden_states, key_value_states, packed_seq_params, inference_context, **kwargs
            )
        projections = Projections(self, context.megatron).on(packed_seq_params, hidden_states)
        exchange = key_exchange(self.core_attention, context.options, context.megatron, projections.documents)
        if exchange is None:
            query, key, _, latent_query, _ = absorbed_query_key_value(projections, hidden_states)
        else:
            query, key, _, latent_query, _ = absorbed_query_and_shared_key(
                projections, hidden_states, exchange
            )
        return query, key, latent_query

    return get_query_key_value_tensors


def wait_before_checkpoint(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``AbsorbedMLASelfAttention._checkpointed_attention_forward`` to wait for the gathered key."""

    def _checkpointed_attention_forward(
        self: Any, q_absorbed: Tensor, k_compressed: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        # A gather in flight cannot be recomputed.
        exchange = vars(self.core_attention).get(ATTRIBUTE)
        if exchange is None:
            return original(self, q_absorbed, k_compressed, *args, **kwargs)
        return with_whole_key(
            exchange, k_compressed, lambda whole: original(self, q_absorbed, whole, *args, **kwargs)
        )

    return _checkpointed_attention_forward


def attend_to_shared_keys(
    original: Callable[..., Tensor], context: Context[Options]
) -> Callable[..., Tensor]:
    """Decorate ``DSAttention.forward`` to run our core attention where the kernel hooks are not enough.

    This is the case under context parallelism, where our all-gather has the keys in order. It is also the
    case for layers that share selections: Megatron's kernels do not return selections, so Megatron would run
    selection, loss and attention separately.
    """

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        position_ids: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        up_v_weight: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        is_alone = groups_of(self).cp.size() == 1
        # Reasons: a key exchange, a layer in sharing, separate query parts, recorded or replayed selections.
        has_reason = vars(self).get(ATTRIBUTE) is not None or (
            place_of(self) is not None and context.options.all_ours and packed_seq_params is None
        )
        # Losses of layers that share need the scores of the selected keys, which the hooks do not return.
        learns_served = place_of(self) is not None and context.options.learns_served
        has_reason = has_reason or learns_served
        # Without the rotary part the query is narrower than the key; the hooks need one tensor.
        has_reason = has_reason or query.shape[-1] < key.shape[-1]
        # Recording and replay address tokens by position, which the hooks' arguments do not give.
        if context.options.all_ours and current().microbatch is not None:
            has_reason = True
        is_dealt = _is_dealt_here(packed_seq_params) or (has_reason and is_alone)
        if not has_reason or up_v_weight is None or not is_dealt:
            if learns_served:
                raise ValueError(
                    "fused-dsa: --dsa-indexer-loss-layers needs attention in absorbed form, and under "
                    "context parallelism whole sequences or packs of --pack-documents; train so, or omit it"
                )
            _reduce_gradients(self, context.options, own_rows=False)
            return original(
                self,
                query,
                key,
                value,
                attention_mask,
                x,
                qr,
                position_ids=position_ids,
                attn_mask_type=attn_mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
                up_v_weight=up_v_weight,
                **kwargs,
            )
        if packed_seq_params is not None and query.dim() == 3:  # Megatron drops the batch of packed tensors
            # [t, heads, dim] -> [t, 1, heads, dim]
            query, key = query.unsqueeze(1), key.unsqueeze(1)
        call = call_of(
            self, query, key, up_v_weight, x, qr, context.options, context.megatron, packed_seq_params
        )
        refuse_unknown(attn_mask_type, attention_bias, kwargs)
        _reduce_gradients(self, context.options, own_rows=True)
        return attend(call)

    return forward


def mark_where_keys_are_shared(
    original: Callable[..., None], context: Context[Options]
) -> Callable[..., None]:
    """Decorate ``DSAIndexer.__init__`` with :func:`mark_gradients_of_own_rows` if keys are gathered."""
    marking = mark_gradients_of_own_rows(original)

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        init = marking if shares_keys(config, context.options) else original
        init(self, config, *args, **kwargs)

    return __init__


_OWN_ROWS = "mindspeed_dsa_own_rows"


def _reduce_gradients(attention: Any, options: Options, own_rows: bool) -> None:
    """Have Megatron sum the indexer's gradients if they are of a rank's own rows, or average whole ones.

    Raises:
        ValueError: earlier batches had gradients of the other kind.
    """
    indexer = attention.indexer
    if indexer is None or not (torch.is_grad_enabled() and shares_keys(attention.config, options)):
        return
    if not projects_own_rows(indexer):
        return
    before = vars(indexer).setdefault(_OWN_ROWS, own_rows)
    if before != own_rows:
        raise ValueError(
            "fused-dsa: a batch of documents that Megatron or the script has cut for context parallel ranks "
            "came among others, and the indexer's gradients of both kinds have different sums; train on one "
            "kind, or use --pack-documents"
        )
    sum_gradients(indexer, own_rows)


def _is_dealt_here(packed_seq_params: Any) -> bool:
    """Return whether our layout of tokens applies: whole sequences, or packs of ``--pack-documents``."""
    # Megatron slices and gathers other packed sequences itself.
    return packed_seq_params is None or bool(getattr(packed_seq_params, "dealt_block_rows", 0))
