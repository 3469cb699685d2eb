"""Registry rows about memory features, most of them bit for bit; the other rows are in ``layouts.py``."""

from __future__ import annotations

from functools import partial

from tests.distributed.flags import (
    ACTIVATIONS,
    BF16,
    BLOCKS,
    EP2,
    EXPERTS_CUT,
    FOUR_MICROBATCHES,
    FSDP2,
    FULLY_SHARDED,
    FUSED,
    GROUP,
    MTP,
    ON_HOST,
    OVERLAP,
    PAIRS,
    PP2,
    PP4,
    RECOMPUTED,
    REUSE,
    SELECTIVE,
    SHALLOW,
    SHALLOW_MTP,
    STACKED,
    SWAP,
    TP2,
    VIRTUAL,
    VPP2,
    WITH_SWAP,
    ZERO,
)
from tests.distributed.rows import row
from tests.support import memory_events as events

same_bits = partial(row, bounds=None, watched=events.EVENTS.values())
reuse = partial(same_bits, "reuse-fp32-param", model=BF16, both={}, **REUSE)
swap = partial(same_bits, "swap-optimizer", model=BF16, both={}, **SWAP)

swapped = partial(
    row,
    "swap-attention",
    both={},
    bounds=None,
    watched=(events.EVENTS["swap-attention"],),
    **ON_HOST,
    swap_modules="input_norm,self_attention,post_attention_norm",
)

beside_fsdp2 = partial(same_bits, "fsdp2", both=FSDP2)

VERIFIED = {**RECOMPUTED, "recompute_verify": True}
SOME_LAYERS = {"recompute_activation_function_num_layers": 1, "recompute_norm_num_layers": 1}
recomputed = partial(
    row,
    "recompute",
    watched=(events.EVENTS["recompute-activation-function"], events.EVENTS["recompute-norm"]),
    **VERIFIED,
)

MEMORY = (
    reuse("PP4 x VPP2, all others", 4, f"{PP4} {VPP2} {ZERO}", **ACTIVATIONS, **VIRTUAL),
    reuse("TP2+SP, all others, fused DSA", 2, f"{TP2} {ZERO}", both=FUSED, **ACTIVATIONS, **VIRTUAL),
    reuse("PP4 x VPP2, overlap", 4, f"{PP4} {VPP2} {ZERO} {OVERLAP}"),
    reuse("PP2 x DP2, overlap", 4, f"{PP2} {ZERO} {OVERLAP}"),
    reuse("PP2, without the distributed optimizer", 2, PP2),
    reuse("EP2", 2, EP2),
    reuse("EP2 x DP2, distributed optimizer", 4, f"{EP2} {ZERO}"),
    reuse("TP2+SP x DP2, distributed optimizer", 4, f"{TP2} {ZERO}"),
    swap("PP4 x VPP2, all others", 4, f"{PP4} {VPP2} {ZERO}", **ACTIVATIONS),
    swap("PP2 x DP2, overlap, all others", 4, f"{PP2} {ZERO} {OVERLAP}", **ACTIVATIONS),
    swap("PP4 x VPP2, overlap", 4, f"{PP4} {VPP2} {ZERO} {OVERLAP}"),
    swap("EP2 x DP2, distributed optimizer", 4, f"{EP2} {ZERO}"),
    swap("TP2+SP x DP2, distributed optimizer", 4, f"{TP2} {ZERO}"),
    swap("PP2, without the distributed optimizer", 2, PP2),
    swapped("PP2", 2, PP2),
    swapped("PP4 x VPP2", 4, f"{PP4} {VPP2}"),
    swapped("PP4 x VPP2, norms and activations recomputed", 4, f"{PP4} {VPP2}", both=RECOMPUTED),
    swapped("TP2+SP, fused DSA", 2, TP2, both=FUSED),
    swapped("TP2+SP x PP2", 4, f"{TP2} {PP2}"),
    swapped("EP2 x DP2, distributed optimizer, overlap, bf16", 4, f"{EP2} {ZERO} {OVERLAP}", BF16),
    swapped("PP2, experts and up-projection recomputed", 2, f"{PP2} {SELECTIVE} moe core_attn mla_up_proj"),
    swapped("TP2+SP, MTP", 2, TP2, MTP),
    beside_fsdp2(
        "PP2 x VPP2 x EP2, memory", 4, f"{FULLY_SHARDED} {PP2} {VPP2} {EP2}", f"{SHALLOW} {BF16}", **WITH_SWAP
    ),
    beside_fsdp2(
        "TP2+SP x DP2, MTP, memory",
        4,
        f"{FULLY_SHARDED} {TP2}",
        f"{SHALLOW_MTP} {BF16}",
        **ACTIVATIONS,
        **VIRTUAL,
    ),
    beside_fsdp2(
        "PP2 x VPP2 x EP2, pairs, memory",
        4,
        f"{FULLY_SHARDED} {PP2} {VPP2} {EP2} {FOUR_MICROBATCHES}",
        f"{SHALLOW} {BF16}",
        both={**FSDP2, **PAIRS},
        **WITH_SWAP,
    ),
    beside_fsdp2(
        "sharded experts, EP2 x EDP2, grouped, memory",
        4,
        f"{FULLY_SHARDED} --fsdp2-shard-experts {EP2} {STACKED}",
        f"{SHALLOW} {BF16}",
        both={**FSDP2, **EXPERTS_CUT, **GROUP},
        **WITH_SWAP,
    ),
    # In fp32, an RMSNorm of several operations rounds its gradients differently when it is recomputed.
    beside_fsdp2(
        "EP2, fp32, grouped experts, memory",
        2,
        f"{FULLY_SHARDED} {EP2} {STACKED}",
        SHALLOW,
        both={**FSDP2, **GROUP},
        **ON_HOST,
        **SWAP,
    ),
    recomputed("PP4 x VPP2", 4, f"{PP4} {VPP2}"),
    recomputed("TP2+SP", 2, TP2),
    recomputed("PP2", 2, PP2),
    recomputed("PP2 x VPP2, some layers", 2, f"{PP2} {VPP2}", **SOME_LAYERS),
    recomputed("EP2", 2, EP2),
    recomputed("DP2, distributed optimizer, overlap", 2, f"{ZERO} {OVERLAP}"),
    recomputed("TP2+SP, MTP", 2, TP2, MTP),
    recomputed("TP2+SP, fused DSA", 2, TP2, **FUSED),
    recomputed("PP2, beside full recompute", 2, f"{PP2} {BLOCKS}"),
    recomputed(
        "one process, beside up-projection and core attention", 1, f"{SELECTIVE} core_attn mla_up_proj"
    ),
    row(
        "recompute-activation-function",
        "PP2",
        2,
        PP2,
        both={},
        bounds=None,
        watched=(events.EVENTS["recompute-activation-function"], events.EVENTS["recompute-norm"]),
        recompute_activation_function=True,
    ),
)
