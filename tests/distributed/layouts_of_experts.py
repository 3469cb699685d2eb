"""Registry rows about token dispatch and expert placement; the other rows are in ``layouts.py``."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.distributed.flags import (
    ACTIVATIONS,
    DENSE,
    EP2,
    EP4,
    ETP1,
    EXPERTS_CUT,
    FOUR_MICROBATCHES,
    FULL_RECOMPUTE,
    FULLY_SHARDED,
    FUSED,
    GROUP,
    MTP,
    OVERLAP,
    PAIRS,
    PERMUTE,
    PP2,
    SELECTIVE,
    SHALLOW,
    STACKED,
    TP2,
    VPP2,
    ZERO,
)
from tests.distributed.rows import BESIDE_STOCK, row
from tests.features.moe.balanced_experts.popular_experts import ALWAYS as HOT_EXPERTS
from tests.features.moe.batch_overlap.layer_in_halves import ALWAYS as HALVES
from tests.features.moe.batch_overlap.layer_in_halves import ATTENTION as HALVES_OF_ATTENTION
from tests.support import memory_events as events

AT_SHARDS: dict[str, Any] = {"use_torch_fsdp2": True}
LATER: dict[str, Any] = {"split_backward": True, "watched": (events.MOVED, events.WAITED)}
AT_EXPERTS = (events.STARTED, events.GROUPED, events.PERMUTED)

launched = partial(
    row, "moe-alltoall-overlap-comm", watched=(events.STARTED,), moe_alltoall_overlap_comm=True
)

halves = partial(row, "moe-batch-overlap", watched=AT_EXPERTS, **HALVES)
attending = partial(
    row, "moe-batch-overlap", watched=(events.STARTED, events.ATTENDED), **HALVES_OF_ATTENTION
)

# Gradient buckets start after a fixed number of gradients, so every forward has equally many moves.
moved = partial(row, "balanced-moe-experts", watched=(events.MOVED,), **HOT_EXPERTS)

grouped = partial(row, "moe-grouped-gemm", watched=(events.GROUPED,), **GROUP)

permuted = partial(row, "moe-permute-fusion", watched=AT_EXPERTS, **PERMUTE)
extended = partial(row, "moe-tp-extend-ep", moe_tp_extend_ep=True)

together = partial(
    row,
    "moe",
    own=f"--moe-permute-fusion {STACKED}",
    watched=(events.MOVED, *AT_EXPERTS),
    moe_alltoall_overlap_comm=True,
    **HOT_EXPERTS,
    **GROUP,
    **PERMUTE,
)

EXPERTS = (
    launched("EP2", 2, EP2, SHALLOW, watched=AT_EXPERTS),
    launched("EP2, beside stock", 2, EP2, both={}, bounds=BESIDE_STOCK),
    launched("TP2+SP x EP2", 2, f"{TP2} {EP2} {ETP1}"),
    launched("PP2 x EP2", 4, f"{PP2} {EP2}"),
    launched("PP2 x VPP2 x EP2", 4, f"{PP2} {VPP2} {EP2}"),
    launched("EP2 x DP2, distributed optimizer, overlap", 4, f"{EP2} {ZERO} {OVERLAP}"),
    launched("EP2, MTP", 2, EP2, MTP),
    launched("EP2, all layers recomputed", 2, f"{EP2} {FULL_RECOMPUTE}"),
    halves("EP2, beside stock", 2, EP2, both={}, bounds=BESIDE_STOCK),
    halves("TP2+SP x EP2", 2, f"{TP2} {EP2} {ETP1}"),
    halves("PP2 x VPP2 x EP2", 4, f"{PP2} {VPP2} {EP2}"),
    halves("EP2 x DP2, distributed optimizer, overlap", 4, f"{EP2} {ZERO} {OVERLAP}"),
    halves("EP2, MTP", 2, EP2, MTP),
    halves("EP2, all layers recomputed", 2, f"{EP2} {FULL_RECOMPUTE}"),
    halves(
        "EP2, grouped experts, fused permutation, fused DSA",
        2,
        f"{EP2} --moe-permute-fusion {STACKED}",
        **GROUP,
        **PERMUTE,
        **FUSED,
    ),
    attending("attention, EP2", 2, EP2, SHALLOW),
    attending("attention, EP2, beside stock", 2, EP2, both={}, bounds=BESIDE_STOCK),
    attending("attention, EP4", 4, EP4),
    attending("attention, TP2+SP x EP2", 2, f"{TP2} {EP2} {ETP1}"),
    attending("attention, PP2 x EP2", 4, f"{PP2} {EP2}"),
    attending("attention, PP2 x VPP2 x EP2", 4, f"{PP2} {VPP2} {EP2}"),
    attending("attention, CP2 x EP2", 2, EP2, cp=2, **FUSED),
    attending("attention, EP2 x DP2, distributed optimizer, overlap", 4, f"{EP2} {ZERO} {OVERLAP}"),
    attending("attention, EP2, MTP", 2, EP2, MTP),
    attending("attention, EP2, all layers recomputed", 2, f"{EP2} {FULL_RECOMPUTE}"),
    attending("attention, EP2, core attention recomputed", 2, f"{EP2} {SELECTIVE} core_attn"),
    attending("attention, EP2, dense latent attention", 2, EP2, DENSE),
    attending("attention, EP2, memory features", 2, EP2, **ACTIVATIONS),
    attending("attention, rows, EP2", 2, EP2, FOUR_MICROBATCHES, **FUSED),
    attending("attention, rows, PP2 x VPP2 x EP2", 4, f"{PP2} {VPP2} {EP2}", FOUR_MICROBATCHES, **FUSED),
    attending("attention, rows, EP2, dense latent attention", 2, EP2, f"{DENSE} {FOUR_MICROBATCHES}"),
    attending(
        "attention, EP2, grouped experts, fused permutation, hot experts, fused DSA",
        2,
        f"{EP2} --moe-permute-fusion {STACKED}",
        watched=(events.STARTED, events.ATTENDED, events.MOVED, *AT_EXPERTS),
        **HOT_EXPERTS,
        **GROUP,
        **PERMUTE,
        **FUSED,
    ),
    moved("EP2, distributed optimizer, overlap", 2, f"{EP2} {ZERO} {OVERLAP}", SHALLOW),
    moved("EP2 x DP2, distributed optimizer, overlap", 4, f"{EP2} {ZERO} {OVERLAP}"),
    moved("EP2 x DP2, one expert", 4, f"{EP2} --overlap-grad-reduce", balanced_moe_hot_expert_num=1),
    moved("PP2 x EP2, distributed optimizer, overlap", 4, f"{PP2} {EP2} {ZERO} {OVERLAP}"),
    moved("TP2+SP as EP2", 2, f"{TP2} {EP2} {ETP1}"),
    moved("EP2, experts recomputed", 2, f"{EP2} {SELECTIVE} moe"),
    moved("EP2, activations recomputed", 2, EP2, recompute_activation_function=True),
    moved("EP2, MTP", 2, EP2, MTP),
    moved("EP4, distributed optimizer, overlap", 4, f"{EP4} {ZERO} {OVERLAP}"),
    moved("EP2 x DP2, FSDP2", 4, f"{EP2} {FULLY_SHARDED}", SHALLOW, **AT_SHARDS),
    moved(
        "EP2 x DP2, FSDP2, experts sharded", 4, f"{EP2} {FULLY_SHARDED}", SHALLOW, **AT_SHARDS, **EXPERTS_CUT
    ),
    moved("PP2 x EP2, split backward", 4, f"{PP2} {EP2}", SHALLOW, **LATER),
    moved("PP2 x EP2 x DP2, split backward, overlap", 8, f"{PP2} {EP2} {ZERO} {OVERLAP}", SHALLOW, **LATER),
    moved(
        "PP2 x VPP2 x EP2, split backward, pairs",
        4,
        f"{PP2} {VPP2} {EP2} {FOUR_MICROBATCHES}",
        SHALLOW,
        both=PAIRS,
        **LATER,
    ),
    moved(
        "PP2 x EP2, split backward, transfers hidden",
        4,
        f"{PP2} {EP2}",
        SHALLOW,
        **LATER,
        moe_alltoall_overlap_comm=True,
    ),
    grouped("EP2, distributed optimizer", 2, f"{EP2} {ZERO} {STACKED}", SHALLOW, watched=AT_EXPERTS),
    grouped("PP2, MTP", 2, f"{PP2} {STACKED}", MTP),
    grouped("TP2+SP x EP2", 4, f"{TP2} {EP2} {STACKED}"),
    grouped("PP2 x EP2 x DP2, overlap", 4, f"{PP2} {EP2} {ZERO} {OVERLAP} {STACKED}"),
    grouped(
        "EP2, fused DSA, activations recomputed",
        2,
        f"{EP2} {STACKED}",
        **FUSED,
        recompute_activation_function=True,
    ),
    permuted("EP2", 2, f"{EP2} --moe-permute-fusion", SHALLOW),
    extended("TP2+SP", 2, TP2, SHALLOW, quick=True),
    extended("TP2+SP x EP2", 4, f"{TP2} {EP2}"),
    together("EP2 x DP2, distributed optimizer, overlap", 4, f"{EP2} {ZERO} {OVERLAP}", SHALLOW, quick=True),
    together("PP2 x VPP2 x EP2", 4, f"{PP2} {VPP2} {EP2}"),
    together("TP2+SP as EP2, chunks", 2, TP2, moe_tp_extend_ep=True, use_ascend_coc=True, coc_parallel_num=2),
    together("EP2, fused DSA", 2, EP2, **FUSED),
    together("EP2, activations recomputed", 2, EP2, recompute_activation_function=True),
    together("EP2, attention swapped", 2, EP2, swap_attention=True),
    together("EP2, norms recomputed", 2, EP2, recompute_norm=True),
    together("EP2, optimizer swapped", 2, f"{EP2} {ZERO}", swap_optimizer=True),
)
