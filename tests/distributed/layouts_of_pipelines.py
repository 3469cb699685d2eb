"""Registry rows about split backward passes, all of them bit for bit; other rows are in ``layouts.py``."""

from __future__ import annotations

from functools import partial

from tests.distributed.flags import (
    BF16,
    EP2,
    ETP1,
    FOUR_MICROBATCHES,
    FSDP2,
    FULL_RECOMPUTE,
    FULLY_SHARDED,
    FUSED,
    GROUP,
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
    SELECTIVE,
    SHALLOW,
    SHALLOW_MTP,
    STACKED,
    SWAP,
    TIED,
    TP2,
    VIRTUAL,
    VPP2,
    ZERO,
)
from tests.distributed.rows import Row, row
from tests.support import memory_events as events

LATER = {"split_backward": True}
REPLICAS = f"{ZERO} {OVERLAP} {FOUR_MICROBATCHES}"

split = partial(row, "split-backward", both=FUSED, bounds=None, steps=10, watched=(events.WAITED,), **LATER)
sharded = partial(split, both=FSDP2, watched=(events.WAITED, events.GATHERED))
overlapped = partial(
    split, both={**FUSED, "moe_alltoall_overlap_comm": True}, watched=(events.WAITED, events.STARTED)
)
paired = partial(split, both={**FUSED, **PAIRS}, watched=(events.WAITED, events.STARTED))


def in_bf16(name: str, *features: str) -> Row:
    """Return a row in bf16 with fp32 master weights, for features that change the optimizer."""
    switches_of = {"reuse-fp32-param": REUSE, "virtual-optimizer": VIRTUAL, "swap-optimizer": SWAP}
    switches = {name: value for feature in features for name, value in switches_of[feature].items()}
    watched = (events.WAITED, *(events.EVENTS[feature] for feature in features))
    return split(name, 2, f"{PP2} {ZERO}", f"{SHALLOW} {BF16}", both={**FUSED, **switches}, watched=watched)


PIPELINES = (
    split("PP2", 2, PP2, SHALLOW),
    split("PP4", 4, PP4),
    split("PP4, one waits", 4, PP4, split_backward_waiting=1),
    split("PP2 x VPP2", 2, f"{PP2} {VPP2}", SHALLOW),
    split("PP4 x VPP2", 4, f"{PP4} {VPP2}"),
    split("PP4 x VPP2, no P2P overlap", 4, f"{PP4} {VPP2} --no-overlap-p2p-communication"),
    split("TP2+SP x PP2", 4, f"{TP2} {PP2}", SHALLOW),
    split("PP2 x EP2", 4, f"{PP2} {EP2}", SHALLOW),
    split("PP2 x DP2, distributed optimizer, overlap", 4, f"{PP2} {REPLICAS}", SHALLOW),
    split("PP2 x VPP2 x DP2, distributed optimizer, overlap", 4, f"{PP2} {VPP2} {REPLICAS}", SHALLOW),
    split("PP2 x VPP2 x DP2, overlap alone", 4, f"{PP2} {VPP2} {REPLICAS} --no-align-grad-reduce", SHALLOW),
    split("PP2 x DP2, overlap alone", 4, f"{PP2} {REPLICAS} --no-align-grad-reduce", SHALLOW),
    split("PP2, layers recomputed", 2, f"{PP2} {FULL_RECOMPUTE}", SHALLOW),
    split("PP2, projections recomputed", 2, f"{PP2} {SELECTIVE} mla_up_proj", SHALLOW),
    split("PP2, recomputed in bubbles", 2, f"{PP2} {FULL_RECOMPUTE}", SHALLOW, recompute_in_bubble=True),
    split("PP2, tied", 2, PP2, f"{SHALLOW} {TIED}"),
    split("PP2, MTP", 2, PP2, SHALLOW_MTP),
    split("PP2, bf16", 2, f"{PP2} {ZERO}", f"{SHALLOW} {BF16}"),
    in_bf16("PP2, bf16, one storage of weights, mapped moments", "reuse-fp32-param", "virtual-optimizer"),
    in_bf16("PP2, bf16, optimizer swapped", "swap-optimizer"),
    split("PP2, packs", 2, f"{PP2} {PACK}", PACKS, both=PACKED),
    split("PP2, dropout", 2, f"{PP2} --hidden-dropout 0.1", SHALLOW),
    split("PP2, per token", 2, PP2, f"{SHALLOW} {PER_TOKEN_ALONE}"),
    split("PP2, dense GPT", 2, PP2, stock=True, both={}),
    split("PP2 x EP2, grouped experts", 4, f"{PP2} {EP2} {STACKED}", SHALLOW, both={**FUSED, **GROUP}),
    split("PP2, outputs recomputed, swapped", 2, PP2, SHALLOW, both={**FUSED, **RECOMPUTED, **ON_HOST}),
    sharded("PP2 x DP2, FSDP2", 4, f"{PP2} {FULLY_SHARDED} {FOUR_MICROBATCHES}", SHALLOW),
    sharded("PP2 x VPP2 x DP2, FSDP2", 4, f"{PP2} {VPP2} {FULLY_SHARDED} {FOUR_MICROBATCHES}", SHALLOW),
    sharded(
        "PP2 x DP2, FSDP2, layers recomputed",
        4,
        f"{PP2} {FULLY_SHARDED} {FOUR_MICROBATCHES} {FULL_RECOMPUTE}",
        SHALLOW,
    ),
    paired("PP2 x VPP2 x EP2, pairs", 4, f"{PP2} {VPP2} {EP2} {FOUR_MICROBATCHES}", SHALLOW),
    paired(
        "PP2 x VPP2 x EP2, pairs, distributed optimizer, overlap",
        4,
        f"{PP2} {VPP2} {EP2} {REPLICAS}",
        SHALLOW,
    ),
    paired(
        "PP2 x VPP2 x EP2, pairs, layers recomputed, MTP",
        4,
        f"{PP2} {VPP2} {EP2} {FOUR_MICROBATCHES} {FULL_RECOMPUTE}",
        SHALLOW_MTP,
    ),
    paired(
        "PP2 x VPP2 x EP2, pairs, grouped experts recomputed in bubbles",
        4,
        f"{PP2} {VPP2} {EP2} {FOUR_MICROBATCHES} {STACKED} {FULL_RECOMPUTE}",
        SHALLOW,
        both={**FUSED, **PAIRS, **GROUP, "recompute_in_bubble": True},
    ),
    paired(
        "PP2 x VPP2 x TP2+SP x EP2, pairs",
        4,
        f"{PP2} {VPP2} {TP2} {EP2} {ETP1} {FOUR_MICROBATCHES}",
        SHALLOW,
    ),
    paired(
        "PP2 x VPP2 x EP2, pairs, FSDP2",
        4,
        f"{PP2} {VPP2} {EP2} {FULLY_SHARDED} {FOUR_MICROBATCHES}",
        SHALLOW,
        both={**FSDP2, **PAIRS},
        watched=(events.WAITED, events.GATHERED, events.STARTED),
    ),
    paired(
        "PP2 x VPP2 x EP2, pairs, FSDP2, layers recomputed",
        4,
        f"{PP2} {VPP2} {EP2} {FULLY_SHARDED} {FOUR_MICROBATCHES} {FULL_RECOMPUTE}",
        SHALLOW,
        both={**FSDP2, **PAIRS},
        watched=(events.WAITED, events.GATHERED, events.STARTED),
    ),
    overlapped("PP2 x EP2, all-to-alls overlapped", 4, f"{PP2} {EP2}", SHALLOW),
)
