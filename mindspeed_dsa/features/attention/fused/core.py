"""``DSAttention.forward`` on our operators, each of which can be left to Megatron's own code.

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.features.attention.context_parallel import visible_ends
from mindspeed_dsa.features.attention.fused import options, warmup
from mindspeed_dsa.features.attention.fused.attend import (
    Attended,
    Operands,
    attend_densely,
    attend_sparsely,
    attend_with_host,
)
from mindspeed_dsa.features.attention.fused.indexer import (
    Selection,
    choose_with_host,
    index_inputs,
)
from mindspeed_dsa.features.attention.fused.loss import (
    attach_loss,
    dense_loss,
    host_loss,
    score_gradient_in_backward,
    sparse_loss,
)
from mindspeed_dsa.features.attention.fused.options import Options
from mindspeed_dsa.features.attention.loss_gate_impl import coefficient
from mindspeed_dsa.ops.indexer_kl_loss import takes_lse
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer


def fused_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``DSAttention.forward``.

    Takes causal self-attention over whole sequences, in plain or absorbed form. A mask that Megatron's own
    code takes as a tensor goes to the original.
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
        operands = operands_of(self, query, key, value)
        if not operands.absorbed and attn_mask_type is None:
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
        _refuse_unknown(attn_mask_type, attention_bias, packed_seq_params, kwargs)
        return sparse_attention(self, operands, x, qr, options.current())

    return forward


def _refuse_unknown(
    attn_mask_type: Any, attention_bias: Tensor | None, packed_seq_params: Any, others: dict[str, Any]
) -> None:
    found = []
    if getattr(attn_mask_type, "name", "") != "causal":
        found.append(f"attn_mask_type {attn_mask_type}")
    if attention_bias is not None:
        found.append("attention_bias")
    if packed_seq_params is not None:
        found.append("packed_seq_params")
    found += [name for name, given in others.items() if given is not None]
    if found:
        raise ValueError(
            f"fused-dsa: DSAttention got {', '.join(found)}; fused DSA has causal attention over unpacked "
            "sequences only. Leave --use-fused-dsa and --use-dsa-absorb away for this job"
        )


def operands_of(attention: Any, query: Tensor, key: Tensor, value: Tensor) -> Operands:
    """What a DSA core attention was called with, and which keys its queries see.

    Args:
        attention: a ``DSAttention``, Megatron's or ours.
        query: ``[s, b, heads, dim]``, a context parallel rank's rows.
        key: ``[keys, b, heads or 1, dim]``, of the whole sequence in its own order.
        value: see :class:`Operands`.

    Raises:
        ValueError: keys are not those of the whole sequence.
    """
    group = attention.indexer.pg_collection.cp
    rows, ranks = query.shape[0], group.size()
    if key.shape[0] != rows * ranks:
        problem = f"fused-dsa: {rows} queries came with {key.shape[0]} keys"
        if ranks == 1:
            raise ValueError(
                f"{problem}, as in generation with a key-value cache; Megatron-core 0.16 to 0.18 cannot "
                "decode with DSA, fused or not"
            )
        raise ValueError(
            f"{problem} on one of {ranks} context parallel ranks; gather the {rows * ranks} keys of the "
            "whole sequence in front of the core attention, or train with --context-parallel-size 1"
        )
    return Operands(query, key, value, attention.softmax_scale, visible_ends(group, rows, query.device))


def sparse_attention(attention: Any, operands: Operands, x: Tensor, qr: Tensor, chosen: Options) -> Tensor:
    """Choose keys, attend to them, and attach the indexer loss where it is wanted.

    Args:
        attention: a ``DSAttention``, Megatron's or ours; its ``training``, ``config``, ``indexer`` and
            ``layer_number`` are read.
        operands: of the main attention.
        x: ``[sequence, batch, hidden]``, as many rows as queries; a rank's part of them under sequence
            parallelism.
        qr: ``[sequence, batch, q_lora_rank]``, likewise.
        chosen: what runs on our operators.

    Returns:
        ``[sequence, batch, heads * value_dim]``.

    Raises:
        ValueError: under context parallelism a part is left to Megatron.
    """
    x, qr = x.detach(), qr.detach()
    if chosen.warmup:
        return warmup.attention(attention, operands, x, qr, chosen.backend)
    if operands.ends is not None and not (chosen.indexer and chosen.attention and chosen.kl_loss):
        raise ValueError(
            "fused-dsa: Megatron's own indexer, attention and indexer loss of this release know no context "
            "parallelism; take --no-use-fused-... away or train with --context-parallel-size 1"
        )

    with_loss = attention.training and torch.is_grad_enabled() and coefficient(attention.config) > 0
    # Keys are those of the whole sequence, however many ranks share its queries.
    length = operands.key.shape[0]
    if chosen.attention and length <= attention.indexer.index_topk:
        return _attend_to_everything(attention, operands, x, qr, chosen, with_loss)

    with torch.set_grad_enabled(with_loss):
        selection = select_keys(attention, operands, x, qr, chosen)
    on_chosen_keys = attention.config.dsa_indexer_use_sparse_loss
    fuse = with_loss and chosen.fuse_kl_in_backward and on_chosen_keys and operands.absorbed
    # A frozen indexer has no backward pass in which its loss could be told.
    if fuse and selection.topk_scores.requires_grad:
        return _attend_with_loss_in_backward(attention, operands, selection, chosen)

    attended = _attend(operands, selection, chosen, with_sum=with_loss and chosen.kl_loss and on_chosen_keys)
    if not with_loss:
        return attended.out
    if not chosen.kl_loss:
        loss = host_loss(attention, operands, selection)
    elif on_chosen_keys:
        loss = sparse_loss(attention, operands, selection, attended, chosen.backend)
    else:
        loss = dense_loss(attention, operands, selection.inputs, chosen.backend)
    return attach_loss(attention, operands, attended.out, loss)


def select_keys(attention: Any, operands: Operands, x: Tensor, qr: Tensor, chosen: Options) -> Selection:
    """The keys of every query, by the operator or by Megatron."""
    indexer = attention.indexer
    if not chosen.indexer:
        return choose_with_host(indexer, x, qr)
    inputs = index_inputs(indexer, x, qr, operands.key.shape[0])
    topk_indices, topk_scores = lightning_indexer(
        inputs.query,
        inputs.key,
        inputs.weights,
        indexer.index_topk,
        ends=operands.ends,
        backend=chosen.backend,
    )
    return Selection(topk_indices, topk_scores, inputs)


def _attend(operands: Operands, selection: Selection, chosen: Options, with_sum: bool) -> Attended:
    if not chosen.attention:
        return attend_with_host(operands, selection.topk_indices)
    if with_sum and operands.absorbed:
        # The sum is the target of the loss, unless the loss forms its own.
        query, topk = operands.query.transpose(0, 1), selection.topk_indices.shape[-1]
        with_sum = not takes_lse(selection.inputs.query, query, topk, backend=chosen.backend)
    return attend_sparsely(operands, selection.topk_indices, chosen.backend, with_sum)


def _attend_with_loss_in_backward(
    attention: Any, operands: Operands, selection: Selection, chosen: Options
) -> Tensor:
    return attend_sparsely(
        operands,
        selection.topk_indices,
        chosen.backend,
        with_sum=False,
        topk_scores=selection.topk_scores,
        score_gradient=score_gradient_in_backward(attention, operands, selection, chosen.backend),
    ).out


def _attend_to_everything(
    attention: Any, operands: Operands, x: Tensor, qr: Tensor, chosen: Options, with_loss: bool
) -> Tensor:
    """A sequence no longer than topk: every visible key is chosen, and only the loss needs the indexer."""
    out = attend_densely(operands, chosen.backend).out
    if not with_loss:
        return out
    if chosen.kl_loss:
        # The chosen keys are all keys, so that both forms of the loss are the dense one.
        inputs = index_inputs(attention.indexer, x, qr, operands.key.shape[0])
        loss = dense_loss(attention, operands, inputs, chosen.backend)
    else:
        loss = host_loss(attention, operands, select_keys(attention, operands, x, qr, chosen))
    return attach_loss(attention, operands, out, loss)
