"""One call of a DSA core attention: what a layer was given, and what was asked for.

Every adapter builds one at its door: the patched core attention (0.16 to 0.18), the backport's, and that of
context parallel ranks from 0.19 on. What lies behind takes the call and nothing else of Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mindspeed_dsa.context_parallel.packs import PackRows
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.dsa.key_exchange.exchange import KeyExchange, groups_of, key_exchange
from mindspeed_dsa.features.dsa.problem import Groups
from mindspeed_dsa.megatron.dsa import Options


@dataclass(frozen=True)
class Call:
    """Arguments of a core attention.

    Attributes:
        layer: a ``DSAttention``, Megatron's or ours; its ``training``, ``config``, ``softmax_scale``,
            ``layer_number`` and ``indexer`` are read. A layer that shares a selection has no indexer.
        query: as in :class:`Operands`.
        key: likewise; on several context parallel ranks also what the exchange put in its place.
        value: likewise.
        x: hidden states ``[sequence, batch, hidden]``, as many rows as queries, or, where earlier rows of
            the sequence have run before, as many as keys; a rank's part of them under sequence parallelism.
        qr: latent queries ``[sequence, batch, q_lora_rank]``, likewise; packed by Megatron without the batch.
        options: the parts that run on our operators.
        megatron: the layer's Megatron.
        groups: ranks with the other heads and the other rows.
        documents: documents that the rows belong to, of a batch of 1; None for whole sequences.
        exchange: the layer's key exchange; None without context parallelism.
        keys: keys of each sequence, over all context parallel ranks.
        earlier: rows of the sequence before those of the query, whose keys and indexer's inputs are here.
    """

    layer: Any
    query: Tensor
    key: Tensor
    value: Tensor
    x: Tensor
    qr: Tensor
    options: Options
    megatron: Megatron
    groups: Groups
    documents: PackRows | None
    exchange: KeyExchange | None
    keys: int
    earlier: int


def call_of(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    x: Tensor,
    qr: Tensor,
    options: Options,
    megatron: Megatron,
    packed_seq_params: Any = None,
) -> Call:
    """Build a call from a core attention's arguments.

    Args:
        layer: as of :class:`Call`, and so are the next seven.
        query: likewise.
        key: likewise.
        value: likewise.
        x: likewise.
        qr: likewise.
        options: likewise.
        megatron: likewise.
        packed_seq_params: Megatron's description of documents; None for whole sequences.

    Raises:
        ValueError: the keys are fewer, or more, than the context parallel ranks have queries; or several
            ranks have keys by head, as in the prefill of generation, which no exchange has gathered.
    """
    groups, rows, keys = groups_of(layer), query.shape[0], key.shape[0]
    documents = None if packed_seq_params is None else PackRows.of(packed_seq_params, rows, groups.cp)
    exchange = key_exchange(layer, options, megatron, documents)
    ranks = 1 if exchange is None else exchange.ranks
    earlier = keys - rows if exchange is None and x.shape[0] == keys > rows else 0
    is_absorbed = value.dim() == 3
    is_whole = keys == rows * ranks and (ranks == 1 or is_absorbed)
    if not (is_whole or earlier or (exchange is not None and exchange.is_on_its_way)):
        problem = f"fused-dsa: {rows} queries came with {keys} keys"
        if ranks == 1:
            raise ValueError(
                f"{problem}, as in generation with a key-value cache; Megatron-core 0.16 to 0.18 cannot "
                "decode with DSA, fused or not"
            )
        if is_absorbed:
            raise ValueError(f"{problem} on one of {ranks} context parallel ranks, not {rows * ranks}")
        raise ValueError(
            f"{problem} by head on one of {ranks} context parallel ranks, which share keys in absorbed form "
            "only; train with --use-dsa-absorb, and generate with --context-parallel-size 1"
        )
    return Call(
        layer=layer,
        query=query,
        key=key,
        value=value,
        x=x,
        qr=qr,
        options=options,
        megatron=megatron,
        groups=Groups.of(groups),
        documents=documents,
        exchange=exchange,
        keys=keys if exchange is None else rows * ranks,
        earlier=earlier,
    )
