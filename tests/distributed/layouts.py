"""The registry of layouts. Each row is one comparison of the main job, run by ``test_parity.py``.

A row names its feature, the layout under test, the reference layout, the permitted differences, and the
events that prove that the feature ran. ``pytest tests/distributed -k fsdp2`` runs all rows of a feature. Rows
without ``quick`` run in ``make test-full`` only. Rows about experts, memory, shared selections and padding
are in the other ``layouts_*.py``.
"""

from __future__ import annotations

from functools import partial

from tests.distributed.flags import (
    BF16,
    DENSE,
    DENSE_LOSS,
    EP2,
    ETP1,
    EXPERTS_CUT,
    FOR_THREE,
    FOUR_MICROBATCHES,
    FULL_RECOMPUTE,
    FULLY_SHARDED,
    FUSED,
    GROUP,
    IN_BACKWARD,
    IN_FP8,
    INTERLEAVED,
    MTP,
    MTP_PER_TOKEN,
    NO_EXPERTS,
    NO_LOSS,
    ON_HOST,
    OVERLAP,
    PACK,
    PACKED,
    PACKS,
    PACKS_PER_TOKEN,
    PAIRS,
    PER_TOKEN,
    PP2,
    PP4,
    RECOMPUTED,
    SELECTIVE,
    SHALLOW,
    SHALLOW_MTP,
    STACKED,
    TIED,
    TP2,
    TP4,
    VPP2,
    ZERO,
)
from tests.distributed.layouts_of_experts import AT_EXPERTS, EXPERTS
from tests.distributed.layouts_of_memory import MEMORY
from tests.distributed.layouts_of_pipelines import PIPELINES
from tests.distributed.layouts_of_sharing import SHARED_SELECTIONS
from tests.distributed.layouts_of_v import IN_V
from tests.distributed.layouts_padded import PADDED
from tests.distributed.parity import Layout
from tests.distributed.rows import AS_DDP, BESIDE_STOCK, ROUNDED, STEPPED, row
from tests.features.moe.batch_overlap.layer_in_halves import ALWAYS as HALVES
from tests.features.moe.batch_overlap.layer_in_halves import ATTENTION as HALVES_OF_ATTENTION
from tests.support import memory_events as events

COMBINATIONS = {
    "megatron": "Megatron's own layouts, with nothing of ours but repairs",
    "moe": "all features for experts at once",
    "recompute": "activation functions and norms recomputed",
    "fused-operators": "all fused operators",
}
"""Names of feature combinations, which a row may give in place of one feature."""

# -- Megatron's own layouts --------------------------------------------------------------------

plain = partial(row, "megatron", watched=AT_EXPERTS)

MEGATRON = (
    plain("TP2+SP", 2, TP2, SHALLOW, quick=True),
    plain("PP2", 2, PP2, SHALLOW),
    plain("PP4 x VPP2, P2P overlap", 4, f"{PP4} {VPP2}"),
    plain("EP2", 2, EP2, SHALLOW),
    plain("DP2, distributed optimizer", 2, ZERO, SHALLOW),
    plain("TP2+SP x PP2", 4, f"{TP2} {PP2}"),
    plain("TP2+SP x EP2", 2, f"{TP2} {EP2} {ETP1}"),
    plain("TP2+SP x DP2, EP2, distributed optimizer", 4, f"{TP2} {EP2} {ZERO}"),
    plain("EP2 x DP2, distributed optimizer", 4, f"{EP2} {ZERO}"),
    plain("EP2, allgather dispatcher", 2, f"{EP2} --moe-token-dispatcher-type allgather"),
    plain("PP2 x VPP2", 2, f"{PP2} {VPP2}"),
    plain("PP4 x VPP2, no P2P overlap", 4, f"{PP4} {VPP2} --no-overlap-p2p-communication"),
    plain("PP2 x EP2", 4, f"{PP2} {EP2}"),
    plain("DP2, overlapped gradients", 2, "--overlap-grad-reduce --ddp-bucket-size 20000"),
    plain("DP2, distributed optimizer, overlap", 2, f"{ZERO} {OVERLAP}"),
    plain("PP2 x VPP2 x DP2, distributed optimizer, overlap", 4, f"{PP2} {VPP2} {ZERO} {OVERLAP}"),
    plain("TP2+SP, core attention recomputed", 2, f"{TP2} {SELECTIVE} core_attn"),
    plain("PP2, all layers recomputed", 2, f"{PP2} {FULL_RECOMPUTE}"),
    plain("TP2+SP, MTP", 2, TP2, MTP),
    plain("PP2, MTP", 2, PP2, MTP),
    plain("PP4 x VPP2, MTP", 4, f"{PP4} {VPP2}", MTP),
    plain("EP2, distributed optimizer, MTP", 2, f"{EP2} {ZERO}", MTP),
    plain("TP2+SP, no indexer loss", 2, TP2, NO_LOSS),
    plain("DP2, overlap, no indexer loss", 2, f"{ZERO} {OVERLAP}", NO_LOSS),
    plain("TP2+SP, dense indexer loss", 2, TP2, DENSE_LOSS),
    plain("dense GPT, TP2", 2, "--tensor-model-parallel-size 2", stock=True),
    plain("dense GPT, PP2", 2, PP2, stock=True),
    plain("dense GPT, PP2 x VPP2", 2, f"{PP2} {VPP2}", stock=True),
    plain("dense GPT, DP2, distributed optimizer, overlap", 2, f"{ZERO} {OVERLAP}", stock=True),
    plain("bf16, DP2, distributed optimizer", 2, f"{ZERO} {OVERLAP}", BF16, bounds=STEPPED),
    plain("bf16, PP2, distributed optimizer", 2, f"{PP2} {ZERO}", BF16, bounds=ROUNDED),
    plain("bf16, EP2, distributed optimizer", 2, f"{EP2} {ZERO}", BF16, bounds=ROUNDED),
    plain("bf16, TP2+SP, distributed optimizer", 2, f"{TP2} {ZERO}", BF16, bounds=ROUNDED),
)

# -- attention ---------------------------------------------------------------------------------

fused = partial(row, "fused-dsa", **FUSED)

shared = partial(row, "dsa-context-parallel", **FUSED)
blocks = partial(row, "cp-block-rows", cp=2, blocks=4, **FUSED)
SWAPPED_INPUTS = {**ON_HOST, "swap_modules": "input_norm,self_attention"}

dense = partial(row, "dense-context-parallel", model=DENSE)
ring = partial(dense, context_parallel_algo="megatron_cp_algo")
heads = partial(dense, context_parallel_algo="ulysses_cp_algo")
parted = partial(row, "mla-sp-tp-sp", model=DENSE, mla_sp_tp_sp=True)

PACKS_ALONE, PACKS_ALONE_PER_TOKEN = (
    Layout("packed", 1, PACK, model, switches=PACKED) for model in (PACKS, PACKS_PER_TOKEN)
)
packed = partial(row, "pack-documents", model=PACKS, reference=PACKS_ALONE, **PACKED)
halved_packs = partial(
    packed, watched=(events.STARTED,), moe_batch_overlap=True, moe_batch_overlap_always=True
)
packed_on = partial(packed, model=PACKS_PER_TOKEN, reference=PACKS_ALONE_PER_TOKEN, steps=10, blocks=16)
in_fp8 = partial(row, "fused-dsa", reference=Layout("one process, FP8 selections", switches=IN_FP8), **IN_FP8)

ATTENTION = (
    fused("TP2+SP", 2, TP2, SHALLOW, quick=True),
    fused("one process"),
    fused("DP2, distributed optimizer, overlap", 2, f"{ZERO} {OVERLAP}"),
    fused("TP2+SP, loss in backward", 2, TP2, **IN_BACKWARD),
    fused("PP4 x VPP2", 4, f"{PP4} {VPP2}"),
    fused("PP2", 2, PP2),
    fused("EP2", 2, EP2),
    fused("TP2+SP x PP2", 4, f"{TP2} {PP2}"),
    fused("TP2+SP, core attention recomputed", 2, f"{TP2} {SELECTIVE} core_attn"),
    fused("core attention recomputed, loss in backward", 1, f"{SELECTIVE} core_attn", **IN_BACKWARD),
    fused("up-projection recomputed", 1, f"{SELECTIVE} mla_up_proj"),
    fused("PP2, all layers recomputed", 2, f"{PP2} {FULL_RECOMPUTE}"),
    fused("TP2+SP, MTP", 2, TP2, MTP),
    fused("TP2+SP, no indexer loss", 2, TP2, NO_LOSS),
    fused("TP2+SP, dense indexer loss", 2, TP2, DENSE_LOSS),
    in_fp8("FP8 selections, TP2+SP", 2, TP2),
    in_fp8("FP8 selections, PP2 x VPP2, all layers recomputed", 2, f"{PP2} {VPP2} {FULL_RECOMPUTE}"),
    in_fp8("FP8 selections, CP2, core attention recomputed", 2, f"{SELECTIVE} core_attn", cp=2),
    in_fp8(
        "FP8 selections, packs on CP2",
        2,
        PACK,
        model=PACKS_PER_TOKEN,
        reference=Layout("packed, FP8 selections", 1, PACK, PACKS_PER_TOKEN, switches={**PACKED, **IN_FP8}),
        cp=2,
        blocks=16,
        pack_documents=True,
    ),
    shared("CP2 x PP2", 4, PP2, "--num-layers 2", steps=10, cp=2),
    shared("CP2", 2, model=SHALLOW, steps=10, cp=2),
    shared("CP2, keys kept", 2, model=SHALLOW, steps=10, cp_keep_gathered=True, cp=2),
    blocks("CP2", 2, model=SHALLOW, steps=10),
    shared("CP4", 4, model=SHALLOW, steps=10, cp=4),
    shared("CP2 x TP2+SP", 4, TP2, SHALLOW, steps=10, cp=2),
    shared("CP2 x PP2 x VPP2", 4, INTERLEAVED, SHALLOW, steps=10, cp=2),
    shared("CP2 x EP2", 2, EP2, SHALLOW, steps=10, cp=2),
    shared("CP2, loss in backward", 2, **IN_BACKWARD, cp=2),
    shared("CP3", 3, model=FOR_THREE, cp=3),
    shared("CP2 x DP2, distributed optimizer, overlap", 4, f"{ZERO} {OVERLAP}", cp=2),
    shared("CP2, MTP", 2, model=MTP_PER_TOKEN, cp=2),
    blocks("CP2, MTP", 2, model=MTP_PER_TOKEN),
    shared("CP2, no indexer loss", 2, "--overlap-grad-reduce", NO_LOSS, cp=2),
    shared("CP2, core attention recomputed", 2, f"{SELECTIVE} core_attn", cp=2),
    shared("CP2, attention swapped", 2, **SWAPPED_INPUTS, cp=2),
    dense(
        "heads over 2, ring of 2",
        4,
        cp=4,
        steps=10,
        context_parallel_algo="hybrid_cp_algo",
        ulysses_degree_in_cp=2,
    ),
    ring("ring of 2", 2, cp=2),
    ring("ring of 3", 3, model=f"{DENSE} {FOR_THREE}", cp=3),
    ring("ring of 2 x TP2+SP", 4, TP2, cp=2),
    ring("ring of 2 x PP2", 4, PP2, cp=2),
    ring("ring of 2 x PP2 x VPP2", 4, INTERLEAVED, cp=2),
    ring("ring of 2 x EP2, distributed optimizer, overlap", 2, f"{EP2} {ZERO} {OVERLAP}", cp=2),
    ring("ring of 2, core attention recomputed", 2, f"{SELECTIVE} core_attn", cp=2),
    ring("ring of 2, MTP", 2, model=f"{DENSE} {MTP_PER_TOKEN}", cp=2),
    heads("heads over 4", 4, cp=4),
    heads("heads over 2 x TP2+SP", 4, TP2, cp=2),
    row("megatron", "dense latent attention, TP2+SP", 2, TP2, DENSE),
    parted("TP2+SP", 2, TP2),
    parted("TP2+SP x DP2, distributed optimizer", 4, f"{TP2} {ZERO}"),
    parted("TP2+SP x ring of 2", 4, TP2, cp=2, context_parallel_algo="megatron_cp_algo"),
    packed("TP2+SP", 2, f"{TP2} {PACK}"),
    packed("PP2, all layers recomputed", 2, f"{PP2} {FULL_RECOMPUTE} {PACK}"),
    packed("PP2 x VPP2", 2, f"{PP2} {VPP2} {PACK}"),
    packed("DP2", 2, PACK),
    packed_on("CP2", 2, PACK, cp=2),
    halved_packs("EP2, halves of tokens", 2, f"{EP2} {PACK}"),
    packed_on("CP4", 4, PACK, cp=4),
    packed_on("CP2 x TP2+SP", 4, f"{TP2} {PACK}", cp=2),
    packed_on("CP2 x PP2", 4, f"{PP2} {PACK}", cp=2),
)

# -- data and tensor parallelism ---------------------------------------------------------------

# Five steps x four microbatches x four layers, gathered in forward and in backward.
SHARDED = {events.GATHERED: 5 * 4 * 4 * 2, events.GROUPED: 1}

fsdp2 = partial(
    row,
    "fsdp2",
    model=SHALLOW,
    own=FULLY_SHARDED,
    both=FUSED,
    bounds=AS_DDP,
    watched=SHARDED,
    use_torch_fsdp2=True,
)
# Ten steps of four microbatches; three layers have experts, gathered in forward and in backward.
with_experts = partial(
    fsdp2,
    own=f"{FULLY_SHARDED} --fsdp2-shard-experts",
    steps=10,
    watched={events.EXPERTS_GATHERED: 10 * 4 * 3 * 2, events.GROUPED: 1},
    **EXPERTS_CUT,
)
halved = partial(fsdp2, watched=(events.GATHERED, events.STARTED, events.ATTENDED), **HALVES_OF_ATTENTION)
in_pairs = partial(fsdp2, watched=(events.GATHERED, events.STARTED), **PAIRS)

chunks = partial(row, "ascend-coc", watched=(events.CHUNKED, events.MEASURED))
same_chunks = partial(chunks, both={}, bounds=BESIDE_STOCK, watched=(events.CHUNKED,))

COMMUNICATION = (
    fsdp2("DP2, loss per token", 2, PER_TOKEN),
    fsdp2("TP2+SP x DP2", 4, TP2),
    fsdp2("TP2+SP x EP2 x DP2", 4, f"{TP2} {EP2} {ETP1}"),
    fsdp2("PP2 x DP2, MTP", 4, PP2, model=SHALLOW_MTP),
    fsdp2("EP2, MTP", 2, EP2, model=SHALLOW_MTP),
    halved("EP2, MTP, halves", 2, EP2, model=SHALLOW_MTP),
    halved("PP2 x VPP2 x EP2, halves", 4, f"{PP2} {VPP2} {EP2}"),
    halved("EP2, layers recomputed, halves", 2, f"{EP2} {FULL_RECOMPUTE}"),
    fsdp2("EP2, halves of tokens", 2, EP2, watched=(events.GATHERED, events.STARTED), **HALVES),
    with_experts(
        "sharded experts, EP2 x EDP2, halves",
        4,
        EP2,
        watched=(events.EXPERTS_GATHERED, events.ATTENDED),
        **HALVES_OF_ATTENTION,
    ),
    with_experts(
        "sharded experts, EP2 x EDP2, halves of tokens",
        4,
        EP2,
        watched=(events.EXPERTS_GATHERED, events.STARTED),
        **HALVES,
    ),
    fsdp2("EP2 x EDP2", 4, EP2),
    fsdp2("PP2 x EP2", 4, f"{PP2} {EP2}"),
    fsdp2("PP2 x VPP2 x EP2, loss per token", 4, f"{PP2} {VPP2} {EP2} {PER_TOKEN}"),
    fsdp2("EP2, layers recomputed", 2, f"{EP2} {FULL_RECOMPUTE}"),
    fsdp2(
        "EP2, outputs recomputed, all-to-alls overlapped",
        2,
        EP2,
        both={**FUSED, **RECOMPUTED, "moe_alltoall_overlap_comm": True},
    ),
    fsdp2("CP2 x DP2", 4, cp=2),
    fsdp2(
        "EP2 x EDP2, grouped experts, MTP", 4, f"{EP2} {STACKED}", model=SHALLOW_MTP, both={**FUSED, **GROUP}
    ),
    fsdp2("PP2 x EP2, grouped experts", 4, f"{PP2} {EP2} {STACKED}", both={**FUSED, **GROUP}),
    with_experts("sharded experts, DP2, all layers recomputed", 2, FULL_RECOMPUTE),
    with_experts("sharded experts, EP2 x EDP2", 4, EP2),
    with_experts("sharded experts, EP2 x EDP2, bf16", 4, EP2, model=f"{SHALLOW} {BF16}", bounds=ROUNDED),
    with_experts("sharded experts, TP2+SP x EDP2", 4, TP2),
    with_experts(
        "sharded experts, TP2+SP as EP2 x EDP2, all-to-alls overlapped",
        4,
        f"{TP2} {EP2} {ETP1}",
        both={**FUSED, "moe_alltoall_overlap_comm": True},
    ),
    with_experts("sharded experts, PP2 x EP2 x EDP2, loss per token", 8, f"{PP2} {EP2} {PER_TOKEN}"),
    with_experts("sharded experts, CP2 x EP2 x EDP2", 4, EP2, cp=2),
    with_experts(
        "sharded experts, EP2 x EDP2, grouped, MTP",
        4,
        f"{EP2} {STACKED}",
        model=SHALLOW_MTP,
        both={**FUSED, **GROUP},
    ),
    with_experts(
        "sharded experts, EP2 x EDP2, pairs",
        4,
        f"{EP2} {FOUR_MICROBATCHES}",
        watched=(events.EXPERTS_GATHERED, events.STARTED),
        **PAIRS,
    ),
    with_experts(
        "sharded experts, PP2 x VPP2 x EP2 x EDP2, grouped, pairs",
        8,
        f"{PP2} {VPP2} {EP2} {FOUR_MICROBATCHES} {STACKED}",
        both={**FUSED, **GROUP},
        watched=(events.EXPERTS_GATHERED, events.STARTED, events.GROUPED),
        **PAIRS,
    ),
    # Forward and backward in pairs, compared with plain DDP in Megatron's usual schedule.
    in_pairs("EP2, MTP, pairs", 2, f"{EP2} {FOUR_MICROBATCHES}", model=SHALLOW_MTP),
    in_pairs(
        "PP2 x VPP2 x EP2, loss per token, pairs", 4, f"{PP2} {VPP2} {EP2} {FOUR_MICROBATCHES} {PER_TOKEN}"
    ),
    in_pairs("TP2+SP x EP2 x DP2, pairs", 4, f"{TP2} {EP2} {FOUR_MICROBATCHES} {ETP1}"),
    same_chunks("TP2+SP, 4 chunks, beside stock", 2, TP2, coc_parallel_num=4),
    same_chunks("TP2+SP, 2 chunks, beside stock", 2, TP2, coc_parallel_num=2),
    same_chunks("TP2+SP, 8 chunks, beside stock", 2, TP2, coc_parallel_num=8),
    same_chunks("TP4+SP, 4 chunks, beside stock", 4, TP4, coc_parallel_num=4),
    same_chunks(
        "TP2 without SP, no experts, 4 chunks, beside stock",
        2,
        "--tensor-model-parallel-size 2",
        NO_EXPERTS,
        watched=(events.CHUNKED_SUM,),
        coc_parallel_num=4,
    ),
    chunks("TP2+SP, 2 chunks, input kept", 2, TP2, coc_parallel_num=2, coc_recompute_all_gather=False),
    chunks("TP2+SP, tuned", 2, f"{TP2} --no-deterministic-mode", use_ascend_coc=True),
    chunks("TP4+SP, 4 chunks", 4, TP4, coc_parallel_num=4),
    chunks("TP2+SP x PP2, 4 chunks", 4, f"{TP2} {PP2}", coc_parallel_num=4),
    chunks("TP2+SP x EP2, 4 chunks", 4, f"{TP2} {EP2}", coc_parallel_num=4),
    chunks("TP2+SP x DP2, distributed optimizer, 4 chunks", 4, f"{TP2} {ZERO}", coc_parallel_num=4),
    chunks("TP2+SP, MTP, 4 chunks", 2, TP2, MTP, coc_parallel_num=4),
    chunks("TP2+SP, fused DSA, 4 chunks", 2, TP2, **FUSED, coc_parallel_num=4),
    chunks("TP2+SP, recomputed, 4 chunks", 2, TP2, **RECOMPUTED, coc_parallel_num=4),
)

# -- operators and compilation: ten steps ------------------------------------------------------

OPERATED = (
    *events.FUSED_OPERATORS.values(),
    *(events.EVENTS[name] for name in ("recompute-norm", "recompute-activation-function", "swap-attention")),
    events.STARTED,
)
operators = partial(
    row, "fused-operators", model=SHALLOW, steps=10, watched=OPERATED, fused_operators=["all"]
)
compiled = partial(
    row,
    "compile-regions",
    model=SHALLOW,
    steps=10,
    watched=(events.REGIONS, events.BESIDE),
    compile_regions=True,
)

without_logits = partial(
    row,
    "fused-linear-cross-entropy",
    model=SHALLOW,
    watched=(events.CHUNKS_OF_LOGITS,),
    fused_linear_cross_entropy=True,
)
TIED_MTP = f"{SHALLOW} {MTP} {TIED}"

divided = partial(
    row,
    "cp-shard-vocabulary",
    model=SHALLOW,
    watched=(events.CHUNKS_OF_LOGITS,),
    cp=2,
    cp_shard_vocabulary=True,
    fused_linear_cross_entropy=True,
    **FUSED,
)

NORMS = {"init_norm_weight_in_fp32": True}
BF16_ALONE = f"{SHALLOW} {BF16}"
norms = partial(
    row,
    "init-norm-weight-in-fp32",
    model=BF16_ALONE,
    reference=Layout("init-norm-weight-in-fp32: one process", model=BF16_ALONE, switches=NORMS),
    bounds=ROUNDED,
    watched=(events.WIDER,),
    **NORMS,
)

FASTER_LAYERS = (
    without_logits("TP2+SP", 2, TP2, fused_linear_cross_entropy_gradient="forward"),
    without_logits("one process, MTP, tied embeddings", model=TIED_MTP),
    without_logits(
        "TP2, MTP", 2, "--tensor-model-parallel-size 2", model=f"{DENSE} {NO_EXPERTS} {MTP}", both={}
    ),
    without_logits("TP2+SP, MTP, tied embeddings", 2, TP2, model=TIED_MTP),
    without_logits("PP2, tied embeddings", 2, PP2, model=f"{SHALLOW} {TIED}"),
    without_logits("PP2, MTP", 2, PP2, model=f"{SHALLOW} {MTP}"),
    without_logits("PP2 x VPP2", 2, f"{PP2} {VPP2}", fused_linear_cross_entropy_gradient="backward"),
    without_logits("CP2", 2, cp=2, **FUSED),
    without_logits("CP2, MTP, per token", 2, model=MTP_PER_TOKEN, cp=2, **FUSED),
    without_logits("DP2, distributed optimizer, overlap", 2, f"{ZERO} {OVERLAP}"),
    without_logits(
        "packs, per token", 1, PACK, model=PACKS_PER_TOKEN, reference=PACKS_ALONE_PER_TOKEN, **PACKED
    ),
    without_logits("PP2 x VPP2 x EP2, pairs", 4, f"{PP2} {VPP2} {EP2} {FOUR_MICROBATCHES}", both=PAIRS),
    without_logits("DP2, FSDP2", 2, own=FULLY_SHARDED, both=FUSED, use_torch_fsdp2=True),
    without_logits(
        "bf16, DP2, distributed optimizer",
        2,
        f"{ZERO} {OVERLAP}",
        model=f"{SHALLOW} {BF16}",
        both={},
        bounds=ROUNDED,
    ),
    divided("CP2", 2, quick=True),
    divided("CP2, tied embeddings, MTP, per token", 2, model=f"{SHALLOW} {MTP_PER_TOKEN} {TIED}"),
    divided("CP2 x TP2+SP", 4, TP2),
    divided(
        "CP2 x TP2, dense",
        4,
        "--tensor-model-parallel-size 2",
        model=f"{DENSE} {NO_EXPERTS}",
        both={},
        use_fused_dsa=False,
    ),
    divided("CP2 x PP2", 4, PP2),
    divided(
        "CP2 x PP2, tied embeddings, distributed optimizer", 4, f"{PP2} {ZERO}", model=f"{SHALLOW} {TIED}"
    ),
    divided("CP2 x DP2, distributed optimizer, overlap", 4, f"{ZERO} {OVERLAP}"),
    divided("CP2 x DP2, overlapped gradients", 4, "--overlap-grad-reduce --ddp-bucket-size 20000"),
    divided("CP2 x EP2, distributed optimizer", 2, f"{EP2} {ZERO}"),
    divided(
        "CP2 x PP2 x VPP2, loss in backward", 4, INTERLEAVED, fused_linear_cross_entropy_gradient="backward"
    ),
    divided(
        "bf16, CP2, distributed optimizer", 2, ZERO, model=f"{SHALLOW} {BF16}", both=FUSED, bounds=ROUNDED
    ),
    norms("TP2+SP", 2, TP2),
    norms("PP2", 2, PP2),
    norms("EP2", 2, EP2),
    norms("DP2, distributed optimizer, overlap", 2, f"{ZERO} {OVERLAP}"),
    norms("TP2+SP x DP2, EP2, distributed optimizer", 4, f"{TP2} {EP2} {ETP1} {ZERO}"),
    operators("one process"),
    operators("TP2+SP x DP2, distributed optimizer, recomputed", 4, f"{TP2} {ZERO}", **RECOMPUTED),
    operators("PP2 x VPP2, attention swapped", 2, f"{PP2} {VPP2}", **ON_HOST),
    operators("EP2, fused DSA, overlapped", 2, EP2, **FUSED, moe_alltoall_overlap_comm=True),
    operators("TP2+SP, fused DSA, chunks", 2, TP2, **FUSED, coc_parallel_num=2),
    operators("CP2, fused DSA", 2, cp=2, **FUSED),
    compiled("one process"),
    compiled("TP2+SP, absorbed", 2, TP2, **FUSED, use_dsa_absorb=True),
    compiled("one process, all that saves host time", fused_operators=["all"], two_streams=True),
)

ROWS = (
    *MEGATRON,
    *ATTENTION,
    *PADDED,
    *SHARED_SELECTIONS,
    *EXPERTS,
    *COMMUNICATION,
    *MEMORY,
    *FASTER_LAYERS,
    *PIPELINES,
    *IN_V,
)
