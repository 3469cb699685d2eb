"""``DSAttention.forward`` as sparse attention on our operators: Megatron-core 0.16 to 0.18, and the backport.

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.context_parallel.gather import GatheredRows
from mindspeed_dsa.context_parallel.packs import PackRows
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.dsa import by_runs, warmup
from mindspeed_dsa.features.dsa.index_projection import (
    SharedIndexInputs,
    index_inputs,
    shared_index_inputs,
)
from mindspeed_dsa.features.dsa.indexer_loss import coefficient, indexer_loss
from mindspeed_dsa.features.dsa.key_exchange.exchange import KeyExchange, key_exchange
from mindspeed_dsa.features.dsa.megatron_parts import parts_left_to_megatron
from mindspeed_dsa.features.dsa.problem import Groups, LossOptions, Operands, Rows, parts_of
from mindspeed_dsa.features.dsa.sparse_attention import OURS, Result, needs_index, sparse_attention
from mindspeed_dsa.megatron.compiled_attention import steps_of
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.ops.cpu import bf16


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
        check_keys(query, key, value, key_exchange(self, context.options, context.megatron))
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
        return attend(self, query, key, value, x, qr, context.options, context.megatron, packed_seq_params)

    return forward


def settle_bf16(context: Context[Options]) -> None:
    """Take the way to multiply bf16 on CPUs that ``--dsa-cpu-bf16`` names, or one for all ranks.

    Called before the model is built; a collective call if the choice is open and there are several ranks.
    Tensor parallel ranks sum their probabilities over keys that each has selected for itself, so near-ties
    must be decided alike.
    """
    if platforms.current().name == "cpu":
        bf16.use(context.options.cpu_bf16)
        bf16.agree()


def refuse_unknown(attn_mask_type: Any, attention_bias: Tensor | None, others: dict[str, Any]) -> None:
    """Raise for arguments that say which keys a row sees in a way that nothing here reads."""
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


def check_keys(query: Tensor, key: Tensor, value: Tensor, exchange: KeyExchange | None) -> None:
    """Refuse keys that are not those of the whole sequence.

    Args:
        query: ``[s, b, heads, dim]``, a context parallel rank's rows.
        key: ``[keys, b, heads or 1, dim]``; on several context parallel ranks also what the exchange put in
            its place.
        value: as in :class:`Operands`.
        exchange: of the layer, on several context parallel ranks.

    Raises:
        ValueError: there are fewer, or more, keys than the context parallel ranks have queries; or several
            ranks have keys by head, as in the prefill of generation, which nobody has gathered.
    """
    rows, ranks = query.shape[0], 1 if exchange is None else exchange.ranks
    is_whole = key.shape[0] == rows * ranks and (ranks == 1 or value.dim() == 3)
    if is_whole or (exchange is not None and exchange.is_on_its_way):
        return
    problem = f"fused-dsa: {rows} queries came with {key.shape[0]} keys"
    if ranks == 1:
        raise ValueError(
            f"{problem}, as in generation with a key-value cache; Megatron-core 0.16 to 0.18 cannot "
            "decode with DSA, fused or not"
        )
    if value.dim() == 3:
        raise ValueError(f"{problem} on one of {ranks} context parallel ranks, not {rows * ranks}")
    raise ValueError(
        f"{problem} by head on one of {ranks} context parallel ranks, which share keys in absorbed form "
        "only; train with --use-dsa-absorb, and generate with --context-parallel-size 1"
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
        key: likewise; on several context parallel ranks also what the exchange put in its place.
        value: likewise.
        x: ``[sequence, batch, hidden]``, as many rows as queries; a rank's part of them under sequence
            parallelism.
        qr: ``[sequence, batch, q_lora_rank]``, likewise; packed by Megatron without the batch.
        options: the parts that run on our operators.
        megatron: the attention's Megatron.
        packed_seq_params: Megatron's description of documents, for a batch of 1; None for whole sequences.

    Returns:
        ``[sequence, batch, heads * value_dim]``.

    Raises:
        ValueError: under context parallelism, or for packed documents, a part runs Megatron's own code.
    """
    indexer, groups, documents = attention.indexer, Groups.of(attention.indexer.pg_collection), None
    x, qr = x.detach(), qr.detach()
    if packed_seq_params is not None:
        documents = PackRows.of(packed_seq_params, query.shape[0], indexer.pg_collection.cp)
        qr = qr.unsqueeze(1) if qr.dim() == 2 else qr
    exchange = key_exchange(attention, options, megatron, documents)
    if (exchange or documents) is not None and not (options.all_ours or options.warmup):
        raise ValueError(
            "fused-dsa: Megatron's own indexer, attention and indexer loss of this release support neither "
            "context parallelism nor packed sequences; omit --no-use-fused-..., or train with "
            "--context-parallel-size 1 and without packs"
        )
    if exchange is not None:
        return _attend_to_shared_keys(
            attention, query, key, value, x, qr, options, megatron, groups, exchange, documents
        )
    steps = steps_of(attention)
    epilog = None if steps is None else steps.epilog
    key, query_rope = parts_of(query, key, value)
    operands = Operands(query, key, value, attention.softmax_scale, epilog=epilog, query_rope=query_rope)
    rows = Rows() if documents is None else Rows.of_pack(documents, query.device)
    all_rows = key.shape[0] * key.shape[1] if rows.count is None else rows.count
    if options.warmup:
        return warmup.attend(
            attention,
            operands,
            rows,
            groups,
            lambda: index_inputs(indexer, x, qr, documents),
            options.backend,
            megatron,
        )
    loss = _loss_options(attention, options, groups, all_rows, megatron)
    if not options.all_ours:
        operands = operands.whole()
    parts = parts_left_to_megatron(attention, operands, x, qr, options, megatron)
    topk, index = indexer.index_topk, None
    if needs_index(key.shape[0], rows, topk, loss, parts):
        with torch.set_grad_enabled(loss is not None):
            index = index_inputs(indexer, x, qr, documents)
    result = sparse_attention(operands, index, topk, rows, groups, loss, options.backend, parts)
    return _with_loss(result, attention, groups, all_rows, megatron)


def _attend_to_shared_keys(
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    x: Tensor,
    qr: Tensor,
    options: Options,
    megatron: Megatron,
    groups: Groups,
    exchange: KeyExchange,
    documents: PackRows | None,
) -> Tensor:
    """:func:`attend` on one of several context parallel ranks.

    The latent key is on its way already. The indexer's key follows it, both arrive behind the indexer's
    projection of queries, and both are freed until backward.
    """
    on_its_way = exchange.take()
    gathered: list[GatheredRows] = [] if on_its_way is None else [on_its_way]
    length = query.shape[0] * exchange.ranks
    if documents is None:
        rows, all_rows = Rows(ends=exchange.ends(query.shape[0], query.device)), length * query.shape[1]
    else:
        rows, all_rows = Rows.of_pack(documents, query.device), documents.pack.tokens

    def project() -> SharedIndexInputs:
        return shared_index_inputs(attention.indexer, x, qr, exchange, megatron, documents)

    def operands() -> Operands:
        whole, receiver = (key, None) if on_its_way is None else on_its_way.wait_with_receiver(key)
        return Operands(query, whole, value, attention.softmax_scale, receiver)

    if options.warmup:
        return warmup.attend(
            attention, operands(), rows, groups, lambda: project().wait(), options.backend, megatron
        )
    loss = _loss_options(attention, options, groups, all_rows, megatron)
    topk, index, shared = attention.indexer.index_topk, None, None
    if needs_index(length, rows, topk, loss, OURS):
        with torch.set_grad_enabled(loss is not None):
            shared = project()
            gathered += [shared.key] if loss is not None else []
    complete = operands()
    if shared is not None:
        with torch.set_grad_enabled(loss is not None):
            index = shared.wait()
    if by_runs.in_runs(query.device):
        runs = exchange.runs(query.shape[0]) if documents is None else documents.runs()
        result = by_runs.attend_by_runs(complete, index, topk, runs, all_rows, groups, loss, options.backend)
    else:
        result = sparse_attention(complete, index, topk, rows, groups, loss, options.backend, OURS)
    return exchange.free(_with_loss(result, attention, groups, all_rows, megatron), gathered)


def _loss_options(
    attention: Any, options: Options, groups: Groups, all_rows: int, megatron: Megatron
) -> LossOptions | None:
    """The indexer loss of a training step; ``all_rows`` are the whole sequences' of the microbatch."""
    if not (attention.training and torch.is_grad_enabled() and coefficient(attention.config) > 0):
        return None
    ours = indexer_loss(megatron)

    def log_and_start(share: Tensor) -> Tensor:
        ours.log(share, attention, groups.context)
        return ours.gradient(share, all_rows)

    return LossOptions(
        coefficient=coefficient(attention.config),
        on_chosen_keys=attention.config.dsa_indexer_use_sparse_loss,
        per_token=ours.takes_sums(attention.config),
        in_backward=log_and_start if options.fuse_kl_in_backward else None,
    )


def _with_loss(result: Result, attention: Any, groups: Groups, all_rows: int, megatron: Megatron) -> Tensor:
    """The output, to whose backward a loss is attached."""
    if result.loss is None:
        return result.out
    indexer_loss(megatron).log(result.loss, attention, groups.context)
    return indexer_loss(megatron).attach(result.out, result.loss, all_rows)
