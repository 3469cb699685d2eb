#!/usr/bin/env bash
# A small DeepSeek-V3.2-shaped model through Megatron-LM's own pretrain_gpt.py, on a machine without accelerator.
#
#   MEGATRON_LM=~/Megatron-LM ./pretrain_gpt_dsa.sh                                    one process
#   NPROC=2 ./pretrain_gpt_dsa.sh --tensor-model-parallel-size 2 --sequence-parallel   flags are added at the end
#   TEXT=~/my-text ./pretrain_gpt_dsa.sh                                               what prepare_text.py made
#
# README.md says what to change on GPUs and NPUs.
set -euo pipefail

: "${MEGATRON_LM:?set MEGATRON_LM to a checkout of Megatron-LM, such as its tag core_v0.16.1}"
here=$(cd "$(dirname "$0")" && pwd)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Megatron's argument checks ask for one connection beside tensor and context parallelism, whatever the device,
# and refuse it beside FSDP.
case " $* " in
    *' --use-torch-fsdp2 '* | *' --use-megatron-fsdp '*) ;;
    *) export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} ;;
esac

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
    --position-embedding-type rope --no-rope-fusion
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0
)
# Before 0.14 latent attention always has YaRN, and there is no such flag.
if grep -q rope-type "$MEGATRON_LM/megatron/training/arguments.py"; then
    model+=(--rope-type rope)
fi
experts=(
    --num-experts 4 --moe-layer-freq '([0]*1+[1]*3)' --moe-ffn-hidden-size 128
    --moe-shared-expert-intermediate-size 128 --moe-router-topk 2 --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall
)
# Kernels that need a CUDA build of Megatron's dependencies.
without_cuda=(
    --distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-swiglu-fusion --no-bias-dropout-fusion
)
training=(
    --micro-batch-size 4 --global-batch-size 8 --train-iters 50
    --optimizer adam --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 5
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --eval-interval 25 --eval-iters 2 --log-interval 1 --distributed-timeout-minutes 5
)
if [ -n "${TEXT:-}" ]; then
    data=(
        --data-path "$TEXT/text_text_document" --split 90,5,5
        --tokenizer-type GPT2BPETokenizer --legacy-tokenizer
        --vocab-file "$TEXT/vocab.json" --merge-file "$TEXT/merges.txt"
    )
else
    # Before 0.16 mock data are numbers up to 4094, whatever the vocabulary.
    vocabulary=4095
    if grep -q '% self.vocab_size' "$MEGATRON_LM/megatron/core/datasets/gpt_dataset.py"; then
        vocabulary=255
    fi
    data=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$vocabulary")
fi

exec "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-1}" \
    "$here/run_megatron.py" "$MEGATRON_LM/pretrain_gpt.py" \
    "${attention[@]}" "${model[@]}" "${experts[@]}" "${without_cuda[@]}" "${training[@]}" "${data[@]}" "$@"
