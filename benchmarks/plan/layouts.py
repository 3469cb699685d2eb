"""Layouts of the example job on four ranks, which cover every kind of parallelism and memory feature."""

from __future__ import annotations

RANKS = 4
SIZES = (
    "--num-layers 4 --hidden-size 192 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 128 "
    "--q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 "
    "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 32 --dsa-indexer-topk 32 --num-experts 8 "
    "--moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 128 --micro-batch-size 2"
)
LAYOUTS = {
    "DP4, fp32": "--global-batch-size 16",
    "DP4, bf16, distributed optimizer": "--global-batch-size 16 --bf16 --use-distributed-optimizer",
    "DP4 EP4, stock DSA, swapped optimizer": (
        "--global-batch-size 8 --bf16 --expert-model-parallel-size 4 --no-use-fused-dsa --swap-optimizer"
    ),
    "DP4 EP2, one storage of weights": (
        "--global-batch-size 8 --bf16 --use-distributed-optimizer --expert-model-parallel-size 2 "
        "--reuse-fp32-param"
    ),
    "TP2 SP DP2": (
        "--global-batch-size 8 --bf16 --use-distributed-optimizer --tensor-model-parallel-size 2 "
        "--sequence-parallel"
    ),
    "TP4 SP EP4": (
        "--global-batch-size 4 --bf16 --use-distributed-optimizer --tensor-model-parallel-size 4 "
        "--sequence-parallel --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    ),
    "PP4, norms and activation functions recomputed": (
        "--global-batch-size 12 --bf16 --pipeline-model-parallel-size 4 --recompute-norm "
        "--recompute-activation-function"
    ),
    "PP2 VPP2 DP2, mapped moments": (
        "--global-batch-size 16 --bf16 --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2 --virtual-optimizer all"
    ),
    "PP2 DP2 in a V": (
        "--global-batch-size 24 --bf16 --pipeline-model-parallel-size 2 --schedules-method dualpipev"
    ),
    "PP4 in a V, weight gradients later": (
        "--num-layers 8 --global-batch-size 20 --bf16 --pipeline-model-parallel-size 4 "
        "--schedules-method dualpipev --dualpipev-dw-detach"
    ),
    "PP4, weight gradients later": (
        "--global-batch-size 16 --bf16 --pipeline-model-parallel-size 4 --split-backward"
    ),
    "TP2 SP PP2, weight gradients later": (
        "--global-batch-size 8 --bf16 --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 2 --split-backward"
    ),
    "TP2 SP PP2 EP2": (
        "--global-batch-size 8 --bf16 --use-distributed-optimizer --tensor-model-parallel-size 2 "
        "--sequence-parallel --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1"
    ),
    "PP2 EP2 DP2, dense weights sharded": (
        "--global-batch-size 8 --bf16 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
        "--use-torch-fsdp2"
    ),
    "EP2 DP4, experts sharded": (
        "--global-batch-size 16 --bf16 --expert-model-parallel-size 2 --use-torch-fsdp2 --fsdp2-shard-experts"
    ),
    "CP2 DP2, swapped attention": (
        "--global-batch-size 8 --bf16 --use-distributed-optimizer --context-parallel-size 2 "
        "--swap-attention --swap-attention-min-bytes 1"
    ),
    "CP2 PP2, divided vocabulary": (
        "--global-batch-size 8 --bf16 --context-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--cp-shard-vocabulary --fused-linear-cross-entropy"
    ),
    "PP2 DP2, shared selections": (
        "--global-batch-size 16 --bf16 --pipeline-model-parallel-size 2 --dsa-indexer-topk-freq 2"
    ),
    "CP2 DP2, shared selections": (
        "--global-batch-size 8 --bf16 --use-distributed-optimizer --context-parallel-size 2 "
        "--dsa-indexer-topk-freq 4"
    ),
}
"""Flags in addition to :data:`SIZES`, by name."""


def flags_of(name: str) -> list[str]:
    """Return a layout's flags of ``pretrain_dsa.py``."""
    return f"{SIZES} {LAYOUTS[name]}".split()
