"""Key exchange of a DSA layer of Megatron: its process groups and layout of tokens.

Imports Megatron only when called, because these functions are loaded while Megatron is being imported.
"""

from __future__ import annotations

from typing import Any

from mindspeed_dsa.context_parallel.key_exchange import KeyExchange
from mindspeed_dsa.context_parallel.layout import Zigzag
from mindspeed_dsa.context_parallel.packs import PackRows
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.megatron.dsa import Options

ATTRIBUTE = "_key_exchange"
"""Name of the attribute in which a core attention stores its :class:`KeyExchange`."""


def key_exchange(
    attention: Any, options: Options, megatron: Megatron, documents: PackRows | None = None
) -> KeyExchange | None:
    """Return the layer's key exchange, created on first use; None without context parallelism.

    Args:
        attention: ``DSAttention`` module, Megatron's or ours.
        options: options with the layout of tokens over ranks, and whether gathered keys stay in memory.
        megatron: Megatron that the attention belongs to.
        documents: packed documents of this microbatch; None for whole sequences.
    """
    groups = groups_of(attention)
    if groups.cp.size() == 1:
        return None
    exchange: KeyExchange | None = vars(attention).get(ATTRIBUTE)
    if exchange is None:
        everyone = None
        if attention.config.sequence_parallel and groups.tp.size() > 1:
            everyone = getattr(groups, "tp_cp", None)
            if everyone is None:
                everyone = megatron("core.parallel_state").get_tensor_and_context_parallel_group()
        layout = Zigzag(groups.cp.size(), options.cp_block_rows)
        exchange = KeyExchange(groups.cp, layout, groups.tp, everyone, options.keep_gathered)
        vars(attention)[ATTRIBUTE] = exchange
    exchange.share(None if documents is None else documents.layout)
    return exchange


def groups_of(attention: Any) -> Any:
    """Return the process groups of a ``DSAttention``.

    Since 0.19 they are an attribute of the attention. Before 0.19 they are the indexer's; when a sharing
    layer's indexer is removed, they are copied to the attention.
    """
    groups = getattr(attention, "pg_collection", None)
    return attention.indexer.pg_collection if groups is None else groups
