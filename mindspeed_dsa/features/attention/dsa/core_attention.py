"""``DSAttention.forward`` as sparse attention on our operators: Megatron-core 0.16 to 0.18, and the backport.

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.context import Context, Megatron
from mindspeed_dsa.features.attention.dsa import warmup
from mindspeed_dsa.features.attention.dsa.index_projection import index_inputs
from mindspeed_dsa.features.attention.dsa.megatron_parts import parts_left_to_megatron
from mindspeed_dsa.features.attention.dsa.options import Options
from mindspeed_dsa.features.attention.dsa.problem import Groups, LossOptions, Operands, Rows
from mindspeed_dsa.features.attention.dsa.sparse_attention import needs_index, sparse_attention
from mindspeed_dsa.features.attention.indexer_loss import coefficient, indexer_loss
from mindspeed_dsa.integration.packs import Pack


def fuse_core_attention(original: Callable[..., Tensor], context: Context[Options]) -> Callable[..., Tensor]:
    """Decorate ``DSAttention.forward``.

    Handles causal self-attention over whole sequences and packed documents, in plain or absorbed form. With a
    mask that Megatron's own code takes as a tensor the original runs.
    """

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        if packed_seq_params is not None and query.dim() == 3:  # by head, as Megatron derives it
            query, key, value = (states.unsqueeze(1) for states in (query, key, value))
        check_keys(self, query, key)
        if value.dim() != 3 and attn_mask_type is None:
            return original(
                self,
                query,
                key,
                value,
                attention_mask,
                x,
                qr,
                attn_mask_type=attn_mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
        _refuse_unknown(attn_mask_type, attention_bias, kwargs)
        return attend(self, query, key, value, x, qr, context.options, context.megatron, packed_seq_params)

    return forward


def _refuse_unknown(attn_mask_type: Any, attention_bias: Tensor | None, others: dict[str, Any]) -> None:
    found = []
    # Padding has ranges of its own, for which Megatron has another name.
    if getattr(attn_mask_type, "name", "") not in ("causal", "padding_causal"):
        found.append(f"attn_mask_type {attn_mask_type}")
    if attention_bias is not None:
        found.append("attention_bias")
    found += [name for name, given in others.items() if given is not None]
    if found:
        raise ValueError(
            f"fused-dsa: DSAttention got {', '.join(found)}; fused DSA supports causal attention only. Omit "
            "--use-fused-dsa and --use-dsa-absorb for this job"
        )


def check_keys(attention: Any, query: Tensor, key: Tensor) -> None:
    """Refuse keys that are not those of the whole sequence.

    Args:
        attention: a ``DSAttention``, Megatron's or ours.
        query: ``[s, b, heads, dim]``, a context parallel rank's rows.
        key: ``[keys, b, heads or 1, dim]``.

    Raises:
        ValueError: there are fewer, or more, keys than the context parallel ranks have queries.
    """
    rows, ranks = query.shape[0], attention.indexer.pg_collection.cp.size()
    if key.shape[0] == rows * ranks:
        return
    problem = f"fused-dsa: {rows} queries came with {key.shape[0]} keys"
    if ranks == 1:
        raise ValueError(
            f"{problem}, as in generation with a key-value cache; Megatron-core 0.16 to 0.18 cannot "
            "decode with DSA, fused or not"
        )
    raise ValueError(
        f"{problem} on one of {ranks} context parallel ranks; gather the {rows * ranks} keys of the "
        "whole sequence before the core attention, or train with --context-parallel-size 1"
    )


def attend(
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    x: Tensor,
    qr: Tensor,
    options: Options,
    megatron: Megatron,
    packed_seq_params: Any = None,
) -> Tensor:
    """Sparse attention of a layer, whose output carries the indexer loss if there is one.

    Args:
        attention: a ``DSAttention``, Megatron's or ours; its ``training``, ``config``, ``indexer``,
            ``softmax_scale`` and ``layer_number`` are read.
        query: as in :class:`Operands`.
        key: likewise.
        value: likewise.
        x: ``[sequence, batch, hidden]``, as many rows as queries; a rank's part of them under sequence
            parallelism.
        qr: ``[sequence, batch, q_lora_rank]``, likewise; packed without the batch.
        options: the parts that run on our operators.
        megatron: the attention's Megatron.
        packed_seq_params: Megatron's description of documents, for a batch of 1; None for whole sequences.

    Returns:
        ``[sequence, batch, heads * value_dim]``.

    Raises:
        ValueError: under context parallelism, or for packed documents, a part runs Megatron's own code.
    """
    operands = Operands(query, key, value, attention.softmax_scale)
    groups = Groups.of(attention.indexer.pg_collection)
    x, qr = x.detach(), qr.detach()
    pack = None
    if packed_seq_params is None:
        rows = Rows.of_rank(groups, query.shape[0], query.device)
    else:
        pack = Pack.of(packed_seq_params, key.shape[0])
        rows = Rows.of_pack(pack, query.device)
        qr = qr.unsqueeze(1) if qr.dim() == 2 else qr
        if not (options.all_ours or options.warmup):
            raise ValueError(
                "fused-dsa: Megatron's own indexer, attention and indexer loss of this release do not "
                "support packed sequences; omit --no-use-fused-..., or do not pack"
            )
    if options.warmup:
        return warmup.attend(attention, operands, rows, groups, x, qr, options.backend, megatron, pack)
    if groups.context is not None and not options.all_ours:
        raise ValueError(
            "fused-dsa: Megatron's own indexer, attention and indexer loss of this release do not support "
            "context parallelism; omit --no-use-fused-... or train with --context-parallel-size 1"
        )
    ours, loss = indexer_loss(megatron), None
    all_rows = rows.divisor(operands)
    if attention.training and torch.is_grad_enabled() and coefficient(attention.config) > 0:

        def log_and_start(share: Tensor) -> Tensor:
            ours.log(share, attention, groups.context)
            return ours.gradient(share, all_rows)

        loss = LossOptions(
            coefficient=coefficient(attention.config),
            on_chosen_keys=attention.config.dsa_indexer_use_sparse_loss,
            in_backward=log_and_start if options.fuse_kl_in_backward else None,
        )
    topk, index = attention.indexer.index_topk, None
    parts = parts_left_to_megatron(attention, operands, x, qr, options, megatron)
    if needs_index(operands, rows, topk, loss, parts):
        with torch.set_grad_enabled(loss is not None):
            index = index_inputs(attention.indexer, x, qr, operands.key.shape[0], pack)
    result = sparse_attention(operands, index, topk, rows, groups, loss, options.backend, parts)
    if result.loss is None:
        return result.out
    ours.log(result.loss, attention, groups.context)
    return ours.attach(result.out, result.loss, all_rows)
