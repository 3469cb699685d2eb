"""Registry rows about layers that share a key selection; the other rows are in ``layouts.py``.

The reference is one process in which the same layers share, with Megatron's own attention and no
recomputation.
"""

from __future__ import annotations

from functools import partial

from tests.distributed.flags import (
    EP2,
    FOUR_MICROBATCHES,
    FULL_RECOMPUTE,
    FULLY_SHARDED,
    FUSED,
    GLM_5_2,
    IN_BACKWARD,
    MTP,
    NO_LOSS,
    ON_HOST,
    OVERLAP,
    PACK,
    PACKED,
    PACKS,
    PAIRS,
    PER_TOKEN_ALONE,
    PP2,
    PP4,
    SELECTIVE,
    SHARING,
    TP2,
    VPP2,
    ZERO,
)
from tests.distributed.parity import Layout
from tests.distributed.rows import AS_DDP, row
from tests.features.moe.batch_overlap.layer_in_halves import ALWAYS as HALVES

sharing = partial(row, "dsa-shared-selections", model=SHARING)
fused = partial(sharing, **FUSED)
AT_ONCE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
CORE_ATTENTION = f"{SELECTIVE} core_attn"
WITH_MTP = f"{SHARING} {MTP}"
MTP_PER_TOKEN = f"{WITH_MTP} {PER_TOKEN_ALONE}"
OF_PACKS = f"{SHARING} {PACKS}"
packed = partial(
    sharing,
    model=OF_PACKS,
    reference=Layout("packed, shared selections", 1, PACK, OF_PACKS, switches=PACKED),
    **PACKED,
)

SHARED_SELECTIONS = (
    fused("TP2+SP, core attention recomputed", 2, f"{TP2} {CORE_ATTENTION}"),
    fused("PP2, all layers recomputed", 2, f"{PP2} {FULL_RECOMPUTE}"),
    sharing("TP2+SP, Megatron's attention", 2, TP2),
    sharing("PP2, Megatron's attention, all layers recomputed", 2, f"{PP2} {FULL_RECOMPUTE}"),
    fused("GLM-5.2's layers", model=GLM_5_2),
    fused("GLM-5.2's layers, TP2+SP, recomputed two at once", 2, f"{TP2} {AT_ONCE}", model=GLM_5_2),
    fused("TP2+SP, loss in backward", 2, TP2, **IN_BACKWARD),
    fused("TP2+SP, no indexer loss", 2, TP2, model=f"{SHARING} {NO_LOSS}"),
    fused("PP2 x VPP2", 2, f"{PP2} {VPP2}"),
    fused("PP2 x VPP2, core attention recomputed", 2, f"{PP2} {VPP2} {CORE_ATTENTION}"),
    fused("PP4", 4, PP4),
    fused("TP2+SP x PP2", 4, f"{TP2} {PP2}"),
    fused("DP2, distributed optimizer, overlap", 2, f"{ZERO} {OVERLAP}"),
    fused("DP2, FSDP2", 2, own=FULLY_SHARDED, both=FUSED, bounds=AS_DDP, use_torch_fsdp2=True),
    fused("CP2", 2, steps=10, cp=2),
    fused("CP2 x PP2, all layers recomputed", 4, f"{PP2} {FULL_RECOMPUTE}", cp=2),
    fused("CP2, MTP", 2, model=MTP_PER_TOKEN, cp=2),
    fused("TP2+SP, MTP, all layers recomputed", 2, f"{TP2} {FULL_RECOMPUTE}", model=WITH_MTP),
    fused("PP2, MTP", 2, PP2, model=WITH_MTP),
    fused("EP2", 2, EP2),
    fused("EP2, halves", 2, EP2, **HALVES),
    # Forward and backward in pairs, compared with Megatron's usual schedule.
    sharing(
        "EP2, pairs, core attention recomputed",
        2,
        f"{EP2} {FOUR_MICROBATCHES} {CORE_ATTENTION}",
        both=FUSED,
        **PAIRS,
    ),
    sharing("PP2 x VPP2 x EP2, pairs", 4, f"{PP2} {VPP2} {EP2} {FOUR_MICROBATCHES}", both=FUSED, **PAIRS),
    sharing(
        "PP2 x VPP2 x EP2, pairs, all layers recomputed",
        4,
        f"{PP2} {VPP2} {EP2} {FOUR_MICROBATCHES}",
        own=FULL_RECOMPUTE,
        both=FUSED,
        steps=10,
        **PAIRS,
    ),
    sharing("PP2, attention swapped", 2, PP2, both=FUSED, bounds=None, **ON_HOST),
    packed("TP2+SP, packs", 2, f"{TP2} {PACK}"),
    packed("PP2, packs, all layers recomputed", 2, f"{PP2} {FULL_RECOMPUTE} {PACK}"),
)
