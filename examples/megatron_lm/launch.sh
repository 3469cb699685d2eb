# What the recipes share, sourced by them: data, kernels that need CUDA, and the start of pretrain_gpt.py.
#
# In:  MEGATRON_LM, a checkout; NPROC processes on this machine, or TORCHRUN, flags of torchrun, on several;
#      TEXT, what prepare_text.py made, in place of Megatron's mock data; PYTHON.
# Out: arrays data, without_cuda; launch FLAGS..., which does not return.

: "${MEGATRON_LM:?set MEGATRON_LM to a checkout of Megatron-LM, such as its tag core_v0.16.1}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Kernels that need a CUDA build of Megatron's dependencies.
without_cuda=(
    --distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-swiglu-fusion --no-bias-dropout-fusion
)

# Before 0.14 latent attention always has YaRN, and there is no such flag.
rope=()
if grep -q rope-type "$MEGATRON_LM/megatron/training/arguments.py"; then
    rope=(--rope-type rope)
fi

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

launch() {
    # Megatron's argument checks ask for one connection beside tensor and context parallelism, whatever the device,
    # and refuse it beside FSDP.
    case " $* " in
        *' --use-torch-fsdp2 '* | *' --use-megatron-fsdp '*) ;;
        *) export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} ;;
    esac
    # shellcheck disable=SC2086  # several flags in one variable
    exec "${PYTHON:-python3}" -m torch.distributed.run \
        ${TORCHRUN:---standalone --nproc-per-node "${NPROC:-1}"} \
        "$here/run_megatron.py" "$MEGATRON_LM/pretrain_gpt.py" "$@"
}
