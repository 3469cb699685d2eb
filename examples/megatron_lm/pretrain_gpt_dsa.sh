#!/usr/bin/env bash
# A small DeepSeek-V3.2-shaped model through Megatron-LM's own pretrain_gpt.py, on a machine without accelerator.
#
#   MEGATRON_LM=~/Megatron-LM ./pretrain_gpt_dsa.sh                                    one process
#   NPROC=2 ./pretrain_gpt_dsa.sh --tensor-model-parallel-size 2 --sequence-parallel   flags are added at the end
#   TEXT=~/my-text ./pretrain_gpt_dsa.sh                                               what prepare_text.py made
#
# README.md says what to change on GPUs and NPUs.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

attention=(
    --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64
    --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 --qk-layernorm
    --experimental-attention-variant dsa
    --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 32 --dsa-indexer-topk 32
    --dsa-indexer-loss-coeff 0.01 --dsa-indexer-use-sparse-loss
)
model=(
    --transformer-impl local
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128
    --position-embedding-type rope "${rope[@]}" --no-rope-fusion
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0
)
experts=(
    --num-experts 4 --moe-layer-freq '([0]*1+[1]*3)' --moe-ffn-hidden-size 128
    --moe-shared-expert-intermediate-size 128 --moe-router-topk 2 --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall
)
training=(
    --micro-batch-size 4 --global-batch-size 8 --train-iters 50
    --optimizer adam --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 5
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --eval-interval 25 --eval-iters 2 --log-interval 1 --distributed-timeout-minutes 5
)

launch "${attention[@]}" "${model[@]}" "${experts[@]}" "${without_cuda[@]}" "${training[@]}" "${data[@]}" "$@"
