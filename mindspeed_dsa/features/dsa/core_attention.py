"""``DSAttention.forward`` on our sparse attention operators, for Megatron-core 0.16 to 0.18 and the backport.

Imports Megatron only when called, because these functions are loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.context_parallel.gather import GatheredRows
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.call import Call, call_of
from mindspeed_dsa.features.dsa.index_projection import start_index
from mindspeed_dsa.features.dsa.indexer_loss import coefficient, indexer_loss
from mindspeed_dsa.features.dsa.loss import attention_mass
from mindspeed_dsa.features.dsa.megatron_parts import parts_left_to_megatron
from mindspeed_dsa.features.dsa.operands import Operands, parts_of
from mindspeed_dsa.features.dsa.problem import LossOptions, Problem, Rows, needs_index
from mindspeed_dsa.features.dsa.served import log_divisor, serving_of, weight_of
from mindspeed_dsa.features.dsa.sparse_attention import attend_by_runs, in_runs, sparse_attention
from mindspeed_dsa.features.dsa.stages import warmup
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.megatron.mla_projections import steps_of
from mindspeed_dsa.megatron.selection_source import (
    NUMBER,
    Chosen,
    LayerRows,
    RowRun,
    SelectionSource,
    current,
    sources_of,
)


def fuse_core_attention(original: Callable[..., Tensor], context: Context[Options]) -> Callable[..., Tensor]:
    """Decorate ``DSAttention.forward`` to run sparse attention on our operators.

    Supports causal self-attention over whole sequences and packed documents, in absorbed or per-head form.
    Per-head calls that pass a mask tensor in place of ``attn_mask_type`` run Megatron's own forward.
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
        if packed_seq_params is not None and query.dim() == 3:  # Megatron's packed per-head tensors
            # [t, heads, dim] -> [t, 1, heads, dim]
            query, key, value = (states.unsqueeze(1) for states in (query, key, value))
        call = call_of(self, query, key, value, x, qr, context.options, context.megatron, packed_seq_params)
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
    """Raise ValueError for a mask, bias or other argument that fused attention does not support."""
    unknown = []
    # Megatron's name for causal attention within packed documents is padding_causal.
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
    """Compute a layer's sparse attention. Backward of the output includes the indexer loss, if there is one.

    Under context parallelism, the all-gather of the latent key has been started before. The indexer's key is
    gathered next, and both transfers overlap with the indexer's query projection. The gathered keys are freed
    after forward, and gathered again in backward.

    Returns:
        Attention output ``[s, b, heads * value_dim]``.

    Raises:
        ValueError: a part of DSA is set to run Megatron's own code, which supports neither context
            parallelism nor packed documents.
    """
    options, exchange, topk = call.options, call.exchange, call.layer.config.dsa_indexer_topk
    if (exchange or call.documents) is not None and not (options.all_ours or options.attends_densely):
        raise ValueError(
            "fused-dsa: Megatron's own indexer, attention and indexer loss of this release support neither "
            "context parallelism nor packed sequences; omit --no-use-fused-..., or train with "
            "--context-parallel-size 1 and without packs"
        )
    rows, under_way = _rows(call), [] if exchange is None else exchange.take()
    if options.attends_densely:
        return warmup.attend(call, _operands(call, under_way), rows, lambda: start_index(call).wait())
    # Divisor of the loss: tokens of the whole microbatch, padding excluded.
    all_rows = call.keys * call.query.shape[1] if rows.count is None else rows.count
    sources, layer_rows = sources_of(call.layer), _layer_rows(call)
    selected = _chosen(call, sources, layer_rows)
    is_shared = selected is not None and selected.is_shared
    # The loss of a layer that shares needs outputs of the indexer that selected.
    has_loss = selected is None or not is_shared or bool(selected.index)
    loss, parts = _loss_options(call, all_rows) if has_loss else None, parts_left_to_megatron(call)
    serving = None if is_shared else serving_of(call)

    gathered, index_under_way = [*under_way], None
    # The indexer is only trained by its loss: without one its projections need no graph.
    with torch.set_grad_enabled(loss is not None):
        if needs_index(call.keys, rows, topk, loss, parts, selected, serving):
            index_under_way = start_index(call)
            # Layers above may read the gathered index key, which is small: it is kept for them.
            is_read_again = serving is not None and not serving.scores
            gathered += index_under_way.gathered if loss is not None and not is_read_again else []
    operands = _operands(call, under_way)
    with torch.set_grad_enabled(loss is not None):
        index = None if index_under_way is None else index_under_way.wait()

    problem = Problem(
        operands, topk, rows, call.groups, loss, options.backend, parts, options.precision, selected, serving
    )
    # NPU operators take causal rows that end at the last key: one call per run of contiguous tokens.
    by_run = exchange is not None and in_runs(call.query.device)
    if by_run:
        result = attend_by_runs(problem, index, layer_rows.find_runs(), all_rows)
    else:
        result = sparse_attention(problem, index)
    if not is_shared:
        for source in sources:
            chosen = Chosen(result.topk_indices, by_run, index=result.served)
            source.took(layer_rows, chosen, partial(attention_mass, problem))
    out = result.out
    if result.loss is not None:
        ours = indexer_loss(call.megatron)
        ours.log(result.loss / problem.wanted.log_divisor, call.layer, call.groups.context)
        out = ours.attach(out, result.loss, all_rows, result.deliveries)
    return out if exchange is None else exchange.free(out, gathered)


def _rows(call: Call) -> Rows:
    """Return the range of keys that each query sees, and the mask that excludes padding from the loss."""
    query, exchange, options = call.query, call.exchange, call.options
    if call.documents is not None:
        return Rows.of_pack(call.documents, query.device)
    if exchange is None:
        rows = Rows.to_last_key(query.shape[0], call.keys, query.device)  # ends [s], or None
    else:
        rows = Rows(ends=exchange.ends(query.shape[0], query.device))  # [s]
    group = call.groups.context
    rank = 0 if group is None else group.rank()
    rows = rows.without(options.padding, rank, (query.shape[0], query.shape[1]), query.device)  # + counted
    # Whole sequences on one rank: with `end`, sparse_attention drops the padding before it calls the
    # operators, if all of them are ours.
    if rows.counted is not None and group is None and options.all_ours:
        rows = replace(rows, end=options.padding.tokens)
    return rows


def _operands(call: Call, under_way: Sequence[GatheredRows]) -> Operands:
    """Return the main attention's operands, after waiting for the gathered keys."""
    query, value, scale = call.query, call.value, call.layer.softmax_scale
    if call.exchange is None:
        steps = steps_of(call.layer)
        key, query_rope = parts_of(query, call.key, value)  # query_rope [s, b, heads, rope]
        epilog = None if steps is None else steps.epilog
        operands = Operands(query, key, value, scale, epilog=epilog, query_rope=query_rope)
        options = call.options
        return operands if options.all_ours or options.attends_densely else operands.whole()
    # One transfer: latent and rotary part of the key in one tensor. Two: one transfer for each part.
    if len(under_way) < 2:
        whole, receiver = under_way[0].wait_with_receiver(call.key) if under_way else (call.key, None)
        return Operands(query, whole, value, scale, receiver)
    # [keys, b, 1, latent], [keys, b, 1, rope]
    (latent, receiver), (rope, rope_receiver) = (part.wait_with_receiver() for part in under_way)
    return Operands(
        query,
        latent,
        value,
        scale,
        receiver,
        query_rope=call.key.squeeze(2).unflatten(-1, (query.shape[2], -1)),  # [s, b, heads, rope]
        key_rope=rope,
        key_rope_receiver=rope_receiver,
    )


def _loss_options(call: Call, all_rows: int) -> LossOptions | None:
    """Return options of the indexer loss, as a mean over ``all_rows`` tokens. None in evaluation."""
    layer, config = call.layer, call.layer.config
    if not (layer.training and torch.is_grad_enabled() and coefficient(config) > 0):
        return None
    # The callback lives until backward. It must not hold the call and thereby the layer's tensors.
    ours, group = indexer_loss(call.megatron), call.groups.context
    divisor = log_divisor(call)

    def log_and_start(share: Tensor) -> Tensor:
        ours.log(share / divisor, layer, group)
        return ours.gradient(share, all_rows)

    return LossOptions(
        coefficient=coefficient(config) * weight_of(call),
        on_chosen_keys=config.dsa_indexer_use_sparse_loss,
        per_token=ours.takes_sums(config),
        in_backward=log_and_start if call.options.fuse_kl_in_backward else None,
        log_divisor=divisor,
    )


# -- sources of selections -----------------------------------------------------------------------


def _layer_rows(call: Call) -> LayerRows:
    """Describe this layer's tokens on this rank, as the argument of a :class:`SelectionSource`'s methods."""
    rows, batch = call.query.shape[:2]
    microbatch = current().microbatch
    tokens = None if microbatch is None else microbatch.tokens
    return LayerRows(
        layer=vars(call.layer).get(NUMBER, 0),
        find_runs=partial(_runs, call),
        batch=batch,
        rows=rows,
        keys=call.keys,
        topk=call.layer.config.dsa_indexer_topk,
        tokens=tokens if tokens is not None and tokens.shape == (batch, rows) else None,
    )


def _chosen(call: Call, sources: Sequence[SelectionSource], rows: LayerRows) -> Chosen | None:
    """Return the keys from the first source that has a selection. None: the indexer selects."""
    answers = (source.choose(rows) for source in sources)
    selected = next((answer for answer in answers if answer is not None), None)
    if selected is None or selected.is_shared:
        return selected
    device = call.query.device
    if call.exchange is not None and call.documents is None and not in_runs(device):
        # Here padding of whole sequences attends like other tokens and is routed to experts. Weight gradients
        # match a recorded run bit for bit only if padding attends to the same keys: the indexer selects them.
        selected = selected.without([run for run in rows.find_runs() if run.low == run.high])
    return selected.to(device)


def _runs(call: Call) -> list[RowRun]:
    """Return runs of consecutive tokens on this rank. Tokens of padding runs see no key (``low == high``)."""
    padding, rows, exchange = call.options.padding, call.query.shape[0], call.exchange
    if call.documents is not None:
        return [RowRun(*run) for run in call.documents.runs()]
    if exchange is None:
        if not padding.rows or call.keys != padding.length or call.keys != rows:
            return [RowRun(0, rows, 0, call.keys)]
        return [RowRun(0, padding.tokens, 0, padding.tokens), RowRun(padding.tokens, rows, 0, 0)]
    runs = [RowRun(*run) for run in exchange.runs(rows)]
    if not padding.rows or call.keys != padding.length:
        return runs
    split_runs = []
    # Split each run where the padding begins: rows [first, data) are data, [data, end) are padding.
    for first, end, low, high in runs:
        data = max(first, end - max(0, high - padding.tokens))
        if data > first:
            split_runs.append(RowRun(first, data, low, high - (end - data)))
        if end > data:
            split_runs.append(RowRun(data, end, 0, 0))
    return split_runs
