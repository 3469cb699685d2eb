"""Command-line flags and feature switches of the rows in ``layouts*.py``: layouts, models, features."""

from __future__ import annotations

# -- layouts -----------------------------------------------------------------------------------

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
PP4 = "--pipeline-model-parallel-size 4"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
DUALPIPEV = "--schedules-method dualpipev"
EP2 = "--expert-model-parallel-size 2"
EP4 = "--expert-model-parallel-size 4"
ZERO = "--use-distributed-optimizer"
ETP1 = "--expert-tensor-parallel-size 1"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
TP4 = "--tensor-model-parallel-size 4 --sequence-parallel"
INTERLEAVED = f"{PP2} {VPP2} --microbatch-group-size-per-virtual-pipeline-stage 2"
PAIRS_OF_LAYERS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
BLOCKS = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
FOUR_MICROBATCHES = "--micro-batch-size 1"
STACKED = "--moe-grouped-gemm"
FULLY_SHARDED = "--use-torch-fsdp2"

# -- models ------------------------------------------------------------------------------------

SHALLOW = "--num-layers 4"  # for quick tests: eight are needed by PP4 x VPP2 alone
BF16 = "--bf16"
MTP = "--mtp-num-layers 1"
SHALLOW_MTP = f"{SHALLOW} {MTP}"
TIED = "--no-untie-embeddings-and-output-weights"
PER_TOKEN = "--calculate-per-token-loss"
# With per-token loss, Megatron weights a rank's share of the balancing loss by this rank's tokens only.
PER_TOKEN_ALONE = f"{PER_TOKEN} --moe-router-load-balancing-type none"
MTP_PER_TOKEN = f"{MTP} {PER_TOKEN_ALONE}"
NO_LOSS = "--dsa-indexer-loss-coeff 0"
DENSE_LOSS = "--no-dsa-indexer-use-sparse-loss"
FOR_THREE = "--seq-length 48 --max-position-embeddings 48"
DENSE = "--experimental-attention-variant none --num-layers 4 --num-attention-heads 8"
NO_EXPERTS = "--num-experts 0 --moe-shared-expert-intermediate-size 0"  # experts train with SP only

# Layers 1, 3, 5 and 7 select: a chunk of two layers begins with one of them.
SHARING = "--dsa-indexer-topk-freq 2"
# Layers 1, 2, 3 and 7 select, as in the first eight of GLM-5.2.
GLM_5_2 = "--dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 3"

# Some samples contain the end of a document.
PACKS = f"{SHALLOW} --seq-length 256"
# Ranks have different numbers of tokens with loss, so their losses only agree per token.
PACKS_PER_TOKEN = f"{PACKS} {PER_TOKEN_ALONE}"
PACK = "--micro-batch-size 1 --pack-documents"

# -- switches ----------------------------------------------------------------------------------

FUSED = {"use_fused_dsa": True}
IN_FP8 = {**FUSED, "dsa_indexer_precision": "fp8"}
IN_BACKWARD = {"dsa_fuse_kl_in_backward": True}
GROUP = {"moe_grouped_gemm": True}
PERMUTE = {"moe_permute_fusion": True}
PAIRS = {"moe_fb_overlap": True}
RECOMPUTED = {"recompute_activation_function": True, "recompute_norm": True}
ON_HOST = {"swap_attention": True, "swap_attention_min_bytes": 0}
SWAP = {"swap_optimizer": True, "swap_optimizer_times": 4}
REUSE = {"reuse_fp32_param": True}
VIRTUAL = {"virtual_optimizer": ["all"]}
# Combined with at most one optimizer feature: --swap-optimizer moves the whole state, so the others are idle.
ACTIVATIONS = {**RECOMPUTED, **ON_HOST}
WITH_SWAP = {**ACTIVATIONS, **SWAP}
PACKED = {**FUSED, "pack_documents": True}
FSDP2 = {**FUSED, "use_torch_fsdp2": True}
V = {"schedules_method": "dualpipev"}
EXPERTS_CUT = {"fsdp2_shard_experts": True}
