"""Selective recomputation of the core attention with DSA."""

from __future__ import annotations

from mindspeed_dsa.megatron.dsa import DSA, MLA, dsa_repair
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs.core_attention_recompute"

_IMPL = f"{_HERE}.recompute"

FEATURE = dsa_repair(
    "dsa-core-attention-recompute",
    summary="Makes --recompute-granularity selective with core_attn work for DSA layers.",
    switch_help="Recompute DSA core attention when selective recomputation of core_attn is requested.",
    patches=(
        Patch(
            f"{MLA}:MLASelfAttention.__init__",
            "wrap",
            f"{_IMPL}:leave_recompute_to_dsa",
            "MLA's own checkpointed path does not pass the indexer's inputs and fails",
            versions=">=0.16,<0.19",
        ),
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_IMPL}:recompute_in_backward",
            "recomputes the core attention together with its indexer",
            params=("query", "key", "value", "attention_mask", "x", "qr"),
            versions=">=0.16,<0.19",
            priority=100,  # outside all wrappers that change what the forward does
        ),
    ),
)
