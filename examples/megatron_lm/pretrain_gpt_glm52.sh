#!/usr/bin/env bash
# GLM-5.2 through Megatron-LM's own pretrain_gpt.py: 78 layers, of which 21 select keys and the others share.
#
#   MEGATRON_LM=~/Megatron-LM TORCHRUN="--nnodes 64 --nproc-per-node 8 ..." ./pretrain_gpt_glm52.sh --data-path ...
#   MEGATRON_LM=~/Megatron-LM TINY=1 ./pretrain_gpt_glm52.sh               8 narrow layers, without accelerator
#   TINY=1 NPROC=2 ./pretrain_gpt_glm52.sh --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 6
#
# Flags behind the script's name are added at the end. docs/design/glm-5.md says what is what, and what to plan first.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# How the indexer scores, and which layers have one: 1, 2, 3, 7, 11, 15, ...
attention=(
    --multi-latent-attention --qk-layernorm
    --experimental-attention-variant dsa --dsa-model glm-5.2 --use-fused-dsa
    --dsa-indexer-loss-coeff 0.01 --dsa-indexer-use-sparse-loss
)
model=(
    --transformer-impl local
    --position-embedding-type rope "${rope[@]}" --rotary-base 8000000 --no-rope-fusion
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
    --mtp-num-layers 1
)
experts=(
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5
    --moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall
)
training=(
    --optimizer adam --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --lr-decay-style cosine
    --log-interval 1
)
if [ -n "${TINY:-}" ]; then
    # Three dense layers and one with experts select, four with experts share.
    attention+=(
        --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 48
        --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 32 --dsa-indexer-topk 32
    )
    model+=(
        --num-layers 8 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4
        --seq-length 128 --max-position-embeddings 128
    )
    experts+=(
        --num-experts 4 --moe-layer-freq '([0]*3+[1]*5)' --moe-router-topk 2
        --moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 128
    )
    training+=(
        --micro-batch-size 2 --global-batch-size 8 --train-iters 50 --lr 3e-3 --min-lr 3e-4 --lr-warmup-iters 5
        --eval-interval 25 --eval-iters 2 --distributed-timeout-minutes 5 "${without_cuda[@]}" "${data[@]}"
    )
else
    attention+=(
        --q-lora-rank 2048 --kv-lora-rank 512 --qk-head-dim 192 --qk-pos-emb-head-dim 64 --v-head-dim 256
        --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048
    )
    model+=(
        --num-layers 78 --hidden-size 6144 --ffn-hidden-size 12288 --num-attention-heads 64
        --seq-length 8192 --max-position-embeddings 202752
    )
    experts+=(
        --num-experts 256 --moe-layer-freq '([0]*3+[1]*75)' --moe-router-topk 8
        --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    )
    # For 512 devices of 141 GB. A selection stays in its stage: each begins with a layer that selects, 1, 3, 15,
    # 27, ... 75.
    training+=(
        --pipeline-model-parallel-size 8
        --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 4
        --expert-model-parallel-size 16 --context-parallel-size 8
        --use-distributed-optimizer --bf16
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
        --micro-batch-size 1 --global-batch-size 1024 --train-iters 10000 --lr 1e-5 --min-lr 1e-6
        --lr-warmup-iters 100 --eval-interval 1000 --eval-iters 4
    )
    if [ -n "${TEXT:-}" ]; then
        training+=("${data[@]}")
    fi
fi

launch "${attention[@]}" "${model[@]}" "${experts[@]}" "${training[@]}" "$@"
