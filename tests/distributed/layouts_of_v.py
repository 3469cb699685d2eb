"""Registry rows about DualPipeV, ten steps each; the other rows are in ``layouts.py``.

The reference is one process, or DualPipeV without the row's other feature.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tests.distributed.flags import (
    BF16,
    DENSE,
    DUALPIPEV,
    EP2,
    EXPERTS_CUT,
    FSDP2,
    FULL_RECOMPUTE,
    FULLY_SHARDED,
    FUSED,
    GROUP,
    MTP,
    MTP_PER_TOKEN,
    NO_EXPERTS,
    ON_HOST,
    OVERLAP,
    PACK,
    PACKED,
    PACKS,
    PAIRS,
    PER_TOKEN_ALONE,
    PP2,
    PP4,
    RECOMPUTED,
    REUSE,
    SHALLOW,
    SHARING,
    STACKED,
    SWAP,
    TIED,
    TP2,
    VIRTUAL,
    ZERO,
    V,
)
from tests.distributed.parity import Layout
from tests.distributed.rows import AS_DDP, ROUNDED, Row, row
from tests.features.moe.balanced_experts.popular_experts import ALWAYS as HOT_EXPERTS
from tests.support import memory_events as events

OVERLAP_GRADIENTS = "--overlap-grad-reduce --ddp-bucket-size 20000"
LATER = {"watched": (events.HANDED_ON, events.WAITED), "dualpipev_dw_detach": True}
EIGHT = "--micro-batch-size 1"
V_OF_PAIRS = f"{PP2} {EP2} {EIGHT} {DUALPIPEV}"
SIXTEEN = "--global-batch-size 16"
TEN = f"{EIGHT} --global-batch-size 10"
dualpipev = partial(row, "dualpipev", own=DUALPIPEV, watched=(events.HANDED_ON,), steps=10, **V)

in_v = partial(row, "dualpipev", steps=10)
later_in_pairs = partial(
    in_v,
    both={**V, **FUSED, **PAIRS},
    bounds=None,
    watched=(events.HANDED_ON, events.STARTED, events.WAITED),
    dualpipev_dw_detach=True,
)
sharded = partial(
    in_v,
    own=FULLY_SHARDED,
    both={**V, **FUSED},
    bounds=AS_DDP,
    watched=(events.HANDED_ON, events.GATHERED),
    use_torch_fsdp2=True,
)


def beside_one_process(
    name: str, ranks: int, flags: str, model: str, microbatches: str = EIGHT, **more: Any
) -> Row:
    """Return a row compared with one process on the same microbatches."""
    alone = Layout(f"dualpipev: one process, {name}", 1, microbatches, model)
    return dualpipev(name, ranks, f"{flags} {microbatches}", model, reference=alone, **more)


UNEVEN = "--num-layers 5 --moe-layer-freq ([0]*2+[1]*3)"
LAYOUT = "--pipeline-model-parallel-layout Et|tt|t|tL"
DROPOUT = f"{PP2} --hidden-dropout 0.1"
WITH_DROPOUT = Layout("dualpipev: dropout", 2, f"{DROPOUT} {DUALPIPEV}", SHALLOW, switches={**V, **FUSED})
# The first step's gradients are bit-identical. Their global norm is not, nor are the clipped updates after
# it.
SAME_FIRST = replace(ROUNDED, first_gradient=0.0)
MASTERS = f"{PP2} {ZERO}"
IN_BF16 = Layout("dualpipev: bf16", 2, f"{MASTERS} {DUALPIPEV}", f"{SHALLOW} {BF16}", switches={**V, **FUSED})
PACKS_ALONE = Layout("dualpipev: packs, one process", 1, PACK, PACKS, switches=PACKED)


def in_bf16(name: str, events_of: tuple[str, ...] = (), **switches: Any) -> Row:
    """Return a row with bf16 weights and fp32 masters, bit-identical to DualPipeV without features."""
    watched = (events.HANDED_ON, events.WAITED, *(events.EVENTS[feature] for feature in events_of))
    more = {**FUSED, **switches}
    return dualpipev(
        name, 2, MASTERS, f"{SHALLOW} {BF16}", reference=IN_BF16, bounds=None, **{**more, "watched": watched}
    )


IN_V = (
    in_v(
        "PP2 x EP2, weight gradients later, hot experts",
        4,
        V_OF_PAIRS,
        both={**V, **FUSED},
        watched=(events.HANDED_ON, events.WAITED, events.MOVED),
        dualpipev_dw_detach=True,
        **HOT_EXPERTS,
    ),
    dualpipev("PP2, as many microbatches as chunks", 2, PP2, SHALLOW),
    beside_one_process("PP4", 4, PP4, ""),
    beside_one_process("PP2, chunks of different sizes, ten microbatches", 2, f"{PP2} {LAYOUT}", UNEVEN, TEN),
    dualpipev("PP2, dense MLA", 2, PP2, f"{DENSE} {NO_EXPERTS}"),
    dualpipev("PP2, tied embeddings", 2, PP2, f"{SHALLOW} {TIED}"),
    dualpipev("PP2, MTP", 2, PP2, f"{SHALLOW} {MTP}"),
    dualpipev("PP2, MTP, per token", 2, PP2, f"{SHALLOW} {MTP_PER_TOKEN}"),
    dualpipev("PP2 x TP2+SP", 4, f"{PP2} {TP2}", SHALLOW),
    dualpipev("PP2 x CP2, fused DSA", 4, PP2, SHALLOW, cp=2, **FUSED),
    dualpipev("PP2, recomputed, norms recomputed", 2, f"{PP2} {FULL_RECOMPUTE}", SHALLOW, **FUSED),
    dualpipev("PP2, attention swapped", 2, PP2, SHALLOW, **FUSED, **RECOMPUTED, **ON_HOST),
    dualpipev("PP2, bf16", 2, PP2, f"{SHALLOW} {BF16}", bounds=ROUNDED),
    dualpipev("PP2, bf16, beside 1F1B", 2, MASTERS, f"{SHALLOW} {BF16}", both=FUSED, bounds=SAME_FIRST),
    in_bf16("PP2, bf16, weight gradients later", dualpipev_dw_detach=True),
    in_bf16("PP2, bf16, optimizer swapped", ("swap-optimizer",), **SWAP),
    in_bf16(
        "PP2, bf16, one storage of weights, mapped moments, weight gradients later",
        ("reuse-fp32-param", "virtual-optimizer"),
        dualpipev_dw_detach=True,
        **REUSE,
        **VIRTUAL,
    ),
    dualpipev("PP2, dense GPT", 2, PP2, stock=True),
    dualpipev("PP2, dense GPT, weight gradients later", 2, PP2, stock=True, **LATER),
    dualpipev("PP2, packs", 2, f"{PP2} {PACK}", PACKS, reference=PACKS_ALONE, **PACKED),
    dualpipev(
        "PP2, packs, weight gradients later",
        2,
        f"{PP2} {PACK}",
        PACKS,
        reference=PACKS_ALONE,
        **PACKED,
        **LATER,
    ),
    dualpipev("PP2, per token, weight gradients later", 2, PP2, f"{SHALLOW} {PER_TOKEN_ALONE}", **LATER),
    dualpipev("PP2, tied embeddings, weight gradients later", 2, PP2, f"{SHALLOW} {TIED}", **LATER),
    dualpipev("PP2, MTP, weight gradients later", 2, PP2, f"{SHALLOW} {MTP}", **LATER),
    dualpipev("PP2, shared selections", 2, PP2, SHARING, both=FUSED),
    beside_one_process(
        "PP2 x DP2, distributed optimizer, overlap, tied embeddings",
        4,
        f"{PP2} {ZERO} {OVERLAP}",
        f"{SHALLOW} {TIED}",
    ),
    beside_one_process("PP2 x DP2, overlap", 4, f"{PP2} {OVERLAP_GRADIENTS}", SHALLOW),
    beside_one_process(
        "PP2 x DP2, distributed optimizer, overlap, weight gradients later",
        4,
        f"{PP2} {ZERO} {OVERLAP}",
        SHALLOW,
        **LATER,
    ),
    dualpipev(
        "PP2, recomputed, weight gradients later",
        2,
        f"{PP2} {FULL_RECOMPUTE}",
        SHALLOW,
        **FUSED,
        **LATER,
    ),
    beside_one_process("PP2 x EP2", 4, f"{PP2} {EP2}", SHALLOW),
    beside_one_process("PP2 x EP2, pairs", 4, f"{PP2} {EP2}", SHALLOW, **PAIRS, **FUSED),
    beside_one_process(
        "PP2 x EP2, pairs, recomputed, MTP",
        4,
        f"{PP2} {EP2} {FULL_RECOMPUTE}",
        f"{SHALLOW} {MTP}",
        **PAIRS,
        **FUSED,
    ),
    later_in_pairs("PP2 x EP2, pairs, weight gradients later", 4, V_OF_PAIRS, SHALLOW),
    later_in_pairs(
        "PP2 x EP2, pairs, overlap, weight gradients later", 4, f"{V_OF_PAIRS} {ZERO} {OVERLAP}", SHALLOW
    ),
    later_in_pairs(
        "PP2 x EP2, pairs, recomputed, MTP, weight gradients later",
        4,
        f"{V_OF_PAIRS} {FULL_RECOMPUTE}",
        f"{SHALLOW} {MTP}",
    ),
    later_in_pairs(
        "PP2 x EP2, pairs, grouped experts, weight gradients later",
        4,
        f"{V_OF_PAIRS} {STACKED}",
        SHALLOW,
        both={**V, **FUSED, **PAIRS, **GROUP},
    ),
    sharded(
        "PP2 x DP2, FSDP2, MTP, loss per token", 4, f"{PP2} {EIGHT} {DUALPIPEV}", f"{SHALLOW} {MTP_PER_TOKEN}"
    ),
    sharded("PP2 x EP2, FSDP2, pairs", 4, V_OF_PAIRS, SHALLOW, both={**V, **FUSED, **PAIRS}),
    sharded(
        "PP2 x EP2 x EDP2, FSDP2, sharded experts, grouped, pairs",
        8,
        f"{V_OF_PAIRS} {STACKED} {SIXTEEN}",
        SHALLOW,
        own=f"{FULLY_SHARDED} --fsdp2-shard-experts",
        both={**V, **FUSED, **PAIRS, **GROUP},
        watched=(events.HANDED_ON, events.EXPERTS_GATHERED, events.STARTED),
        **EXPERTS_CUT,
    ),
    in_v(
        "PP2 x DP2, FSDP2, weight gradients later",
        4,
        f"{PP2} {EIGHT} {DUALPIPEV} {FULLY_SHARDED}",
        SHALLOW,
        both={**V, **FSDP2},
        bounds=None,
        watched=(events.HANDED_ON, events.GATHERED, events.WAITED),
        dualpipev_dw_detach=True,
    ),
    later_in_pairs(
        "PP2 x EP2, pairs, FSDP2, recomputed, weight gradients later",
        4,
        f"{V_OF_PAIRS} {FULLY_SHARDED} {FULL_RECOMPUTE}",
        SHALLOW,
        both={**V, **FSDP2, **PAIRS},
        watched=(events.HANDED_ON, events.GATHERED, events.STARTED, events.WAITED),
    ),
    dualpipev(
        "PP2, dropout, weight gradients later",
        2,
        DROPOUT,
        SHALLOW,
        reference=WITH_DROPOUT,
        bounds=None,
        **FUSED,
        **LATER,
    ),
    dualpipev(
        "PP2, dropout, recomputed",
        2,
        f"{DROPOUT} {FULL_RECOMPUTE}",
        SHALLOW,
        reference=WITH_DROPOUT,
        bounds=None,
        **FUSED,
    ),
)
