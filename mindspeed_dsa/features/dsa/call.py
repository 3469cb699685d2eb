"""Arguments of one call of a DSA core attention, independent of the Megatron release.

Three adapters build a :class:`Call`: the patched core attention (0.16 to 0.18), the backport (before 0.16),
and the adapter for context parallelism (0.19 and later). All other code reads only the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mindspeed_dsa.context_parallel.key_exchange import KeyExchange
from mindspeed_dsa.context_parallel.packs import PackRows
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.dsa.key_exchange.exchange import groups_of, key_exchange
from mindspeed_dsa.features.dsa.problem import Groups
from mindspeed_dsa.megatron.dsa import Options


@dataclass(frozen=True)
class Call:
    """Arguments of one core attention call.

    Attributes:
        layer: ``DSAttention`` module, Megatron's or ours. The attributes ``training``, ``config``,
            ``softmax_scale``, ``layer_number`` and ``indexer`` are read. A layer that reuses another layer's
            selection has no indexer.
        query: query of the main attention, shaped as in :class:`Operands`.
        key: key of the main attention. Under context parallelism, either the placeholder returned by the key
            exchange, or the rotary dimensions of the query.
        value: value of the main attention. In absorbed form, the value's up-projection weight.
        x: hidden states ``[sequence, batch, hidden]`` of the query tokens. If ``key`` has earlier tokens too,
            ``x`` has them as well. A rank's shard under sequence parallelism.
        qr: latent queries ``[sequence, batch, q_lora_rank]``, sharded like ``x``. Megatron drops the batch
            dimension for packed sequences.
        options: options that choose the parts of DSA that run on our operators.
        megatron: Megatron that the layer belongs to.
        groups: tensor parallel group and context parallel group.
        documents: packed documents, with a batch of 1; None for whole sequences.
        exchange: key exchange of the layer; None without context parallelism.
        keys: number of keys of each sequence, over all context parallel ranks.
        earlier: number of tokens at the start of ``x`` and ``key`` that are not queries in this call.
        of_indexer: further argument of the indexer's projection. mcore-bridge's is a pair, with the rotary
            angles of its model; Megatron's is None.
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
    of_indexer: tuple[Any, Tensor] | None = None


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
        layer: ``DSAttention`` module; see :class:`Call` for this argument and the next seven.
        query: query of the main attention.
        key: key of the main attention.
        value: value, or its up-projection.
        x: hidden states.
        qr: latent queries.
        options: options that choose the parts of DSA that run on our operators.
        megatron: Megatron that the layer belongs to.
        packed_seq_params: Megatron's description of documents; None for whole sequences. From mcore-bridge's
            attention, a pair of it and the rotary angles.

    Raises:
        ValueError: the number of keys does not match the queries of all context parallel ranks. Or keys are
            per head under context parallelism (in generation), which the key exchange does not support.
    """
    groups, rows, keys = groups_of(layer), query.shape[0], key.shape[0]
    of_indexer = packed_seq_params if isinstance(packed_seq_params, tuple) else None
    packed_seq_params = packed_seq_params if of_indexer is None else of_indexer[0]
    documents = None if packed_seq_params is None else PackRows.of(packed_seq_params, rows, groups.cp)
    exchange = key_exchange(layer, options, megatron, documents)
    ranks = 1 if exchange is None else exchange.ranks
    # x as long as the keys: this call attends for the last part of a sequence.
    earlier = keys - rows if exchange is None and x.shape[0] == keys > rows else 0
    # The value's up-projection has 3 dimensions [heads, value_dim, latent], a per-head value has 4.
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
        of_indexer=of_indexer,
    )
