"""``DSAttention.forward`` as sparse attention on our operators: Megatron-core 0.16 to 0.18, and the backport.

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.context_parallel.gather import GatheredRows
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.call import Call
from mindspeed_dsa.features.dsa.index_projection import index_inputs, shared_index_inputs
from mindspeed_dsa.features.dsa.key_exchange.exchange import KeyExchange
from mindspeed_dsa.features.dsa.loss import attention_mass
from mindspeed_dsa.features.dsa.megatron_parts import parts_left_to_megatron
from mindspeed_dsa.features.dsa.problem import Operands, Problem, Rows, needs_index, parts_of
from mindspeed_dsa.features.dsa.sparse_attention import attend_by_runs, in_runs, sparse_attention
from mindspeed_dsa.features.dsa.stages import warmup
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.megatron.mla_projections import steps_of
from mindspeed_dsa.megatron.selection_source import Chosen


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
        call = Call(self, query, key, value, x, qr, context.options, context.megatron, packed_seq_params)
        call.check_keys()
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
        refuse_unknown(attn_mask_type, attention_bias, kwargs)
        return attend(call)

    return forward


def refuse_unknown(attn_mask_type: Any, attention_bias: Tensor | None, others: dict[str, Any]) -> None:
    """Raise for arguments that say which keys a row sees in a way that nothing here reads."""
    unknown = []
    # Padding has ranges of its own, for which Megatron has another name.
    if getattr(attn_mask_type, "name", "") not in ("causal", "padding_causal"):
        unknown.append(f"attn_mask_type {attn_mask_type}")
    if attention_bias is not None:
        unknown.append("attention_bias")
    unknown += [name for name, value in others.items() if value is not None]
    if unknown:
        raise ValueError(
            f"fused-dsa: DSAttention got {', '.join(unknown)}; fused DSA supports causal attention only. "
            "Omit --use-fused-dsa and --use-dsa-absorb for this job"
        )


def attend(call: Call) -> Tensor:
    """Attend sparsely in a layer; the output carries the indexer loss if there is one.

    Returns:
        ``[sequence, batch, heads * value_dim]``.

    Raises:
        ValueError: under context parallelism, or for packed documents, a part runs Megatron's own code.
    """
    options, documents, exchange = call.options, call.documents, call.exchange
    if (exchange or documents) is not None and not (options.all_ours or options.attends_densely):
        raise ValueError(
            "fused-dsa: Megatron's own indexer, attention and indexer loss of this release support neither "
            "context parallelism nor packed sequences; omit --no-use-fused-..., or train with "
            "--context-parallel-size 1 and without packs"
        )
    if exchange is not None:
        return _attend_to_shared_keys(call, exchange)
    layer, query = call.layer, call.query
    steps = steps_of(layer)
    key, query_rope = parts_of(query, call.key, call.value)
    operands = Operands(
        query,
        key,
        call.value,
        layer.softmax_scale,
        epilog=None if steps is None else steps.epilog,
        query_rope=query_rope,
    )
    if documents is None:
        rows = call.whole_rows(Rows.to_last_key(query.shape[0], key.shape[0], query.device))
    else:
        rows = Rows.of_pack(documents, query.device)
    if options.attends_densely:
        return warmup.attend(call, operands, rows, lambda: index_inputs(call))
    all_rows = query.shape[0] * query.shape[1] if rows.count is None else rows.count
    if not options.all_ours:
        operands = operands.whole()
    problem = Problem(
        operands,
        call.topk,
        rows,
        call.groups,
        call.loss_options(all_rows),
        options.backend,
        parts_left_to_megatron(call, operands),
        options.precision,
        call.chosen,
    )
    index = None
    if problem.needs_index:
        with torch.set_grad_enabled(problem.loss is not None):
            index = index_inputs(call).of(slice(call.earlier, None), slice(None))
    result = sparse_attention(problem, index)
    call.hand_on(Chosen(result.topk_indices), partial(attention_mass, problem))
    return call.with_loss(result.out, result.loss, all_rows)


def _attend_to_shared_keys(call: Call, exchange: KeyExchange) -> Tensor:
    """Attend on one of several context parallel ranks.

    The latent key is on its way already. The indexer's key follows it, both arrive behind the indexer's
    projection of queries, and both are freed until backward.
    """
    query, options, documents = call.query, call.options, call.documents
    parts = exchange.take()
    gathered: list[GatheredRows] = [*parts]
    length = query.shape[0] * exchange.ranks
    if documents is None:
        rows = call.whole_rows(Rows(ends=exchange.ends(query.shape[0], query.device)))
        all_rows = length * query.shape[1] if rows.count is None else rows.count
    else:
        rows, all_rows = Rows.of_pack(documents, query.device), documents.pack.tokens

    def operands() -> Operands:
        scale = call.layer.softmax_scale
        if len(parts) < 2:
            whole, receiver = parts[0].wait_with_receiver(call.key) if parts else (call.key, None)
            return Operands(query, whole, call.value, scale, receiver)
        (latent, receiver), (rope, rope_receiver) = (part.wait_with_receiver() for part in parts)
        return Operands(
            query,
            latent,
            call.value,
            scale,
            receiver,
            query_rope=call.key.squeeze(2).unflatten(-1, (query.shape[2], -1)),
            key_rope=rope,
            key_rope_receiver=rope_receiver,
        )

    if options.attends_densely:
        return warmup.attend(call, operands(), rows, lambda: shared_index_inputs(call, exchange).wait())
    loss, topk = call.loss_options(all_rows), call.topk
    index, index_under_way = None, None
    with torch.set_grad_enabled(loss is not None):
        if needs_index(length, rows, topk, loss, given=call.chosen):
            index_under_way = shared_index_inputs(call, exchange)
            gathered += [index_under_way.key] if loss is not None else []
    complete = operands()
    with torch.set_grad_enabled(loss is not None):
        index = None if index_under_way is None else index_under_way.wait()
    problem = Problem(
        complete,
        topk,
        rows,
        call.groups,
        loss,
        options.backend,
        precision=options.precision,
        given=call.chosen,
    )
    by_run = in_runs(query.device)
    if by_run:
        result = attend_by_runs(problem, index, call.runs, all_rows)
    else:
        result = sparse_attention(problem, index)
    call.hand_on(Chosen(result.topk_indices, by_run), partial(attention_mass, problem))
    return exchange.free(call.with_loss(result.out, result.loss, all_rows), gathered)
