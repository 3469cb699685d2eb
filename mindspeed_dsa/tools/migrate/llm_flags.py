"""Table of verdicts on the flags of MindSpeed-LLM: for pretraining, then for other tasks."""

from __future__ import annotations

from mindspeed_dsa.tools.migrate.job import Row, different, kept, not_needed, renamed, same, slower
from mindspeed_dsa.tools.migrate.weights import LOAD, MODELS, SAVE

_MODELS = ", ".join(f"--model-type-hf {name}" for name in MODELS)
_CONVERTED = "Only the conversion of Hugging Face's weights reads it."
_OTHER_MODEL = "Of a model that Megatron's GPT does not build."
_GATED = (
    "Of Qwen3-Next's linear attention; Megatron's --experimental-attention-variant gated_delta_net is it."
)
_PREPARED = "Data are prepared beforehand; training reads their .bin and .idx files."
_TUNING = "Only --stage sft with --is-instruction-dataset is served, as Megatron's --sft."
_TUNING_ONLY = "Only MindSpeed-LLM's fine-tuning, inference or evaluation reads it."
_LORA = "LoRA is not served."
_NORM = "Norms that take or return fp32 beside layers in bf16 are not here."
_V4 = "Of DeepSeek-V4's compressed attention, which is not here."
_YARN = "Only --rope-scaling-type yarn or llama3 reads it."

MODEL = [
    *renamed(
        {
            "moe-intermediate-size": "moe-ffn-hidden-size",
            "n-group": "moe-router-num-groups",
            "topk-group": "moe-router-group-topk",
            "routed-scaling-factor": "moe-router-topk-scaling-factor",
            "use-mc2": "use-ascend-mc2",
            "use-deter-comp": "deterministic-mode",
            "shared-expert-gate": "moe-shared-expert-gate",
            "add-rmsnorm-offset": "apply-layernorm-1p",
            "partial-rotary-factor": "rotary-percent",
        }
    ),
    *kept(
        "padded-vocab-size linear-key-head-dim linear-num-key-heads linear-num-value-heads "
        "linear-value-head-dim",
        "Megatron's own flag since 0.14 or 0.16.",
    ),
    *different("cp-attention-mask-type", "Context parallel attention is causal here.", ("causal",)),
    Row("--router-gating-in-fp32", "megatron", "With the value fp32.", "--moe-router-dtype"),
    Row(
        "--seq-aux",
        "megatron",
        "With --moe-router-load-balancing-type none, the value seq_aux_loss of that.",
        "--moe-router-load-balancing-type",
    ),
    *not_needed("norm-topk-prob", "Megatron's router normalises the weights of the selected experts itself."),
    *not_needed(
        "topk-softmax-in-fp32", "Megatron's router takes this softmax in fp32, and nothing is rounded here."
    ),
    *different(
        "moe-revert-type-after-topk",
        "Megatron rounds the softmax before experts are selected; see --moe-router-dtype.",
    ),
    *different(
        "moe-device-level-aux-loss-coeff moe-comm-aux-loss-coeff",
        "Megatron has the auxiliary losses of experts and sequences only.",
        ("0", "0.0", "0."),
    ),
    *different("num-zero-experts", "Experts without weights are not in Megatron."),
    *different("n-hash-layers", "Routing by hash is not in Megatron.", ("0",)),
    *different("shared-expert-gate-output-dimension", "Megatron's gate has one output.", ("1",)),
    Row(
        "--first-k-dense-replace",
        "megatron",
        "Becomes the pattern of layers.",
        "--moe-layer-freq",
    ),
    *not_needed("beta-fast beta-slow", _YARN),
    *not_needed("low-freq-factor high-freq-factor original-max-position-embeddings", _YARN),
    *different(
        "long-factor short-factor long-mscale short-mscale longrope-freqs-type dynamic-factor use-glm-rope",
        "Megatron has no such rotary embedding.",
    ),
    *different(
        "add-output-layer-bias attn-logit-softcapping cla-share-factor dim-model-base "
        "embedding-multiplier-scale fc-type geglu gelu-tanh input-embeds-norm no-post-layer-norm "
        "output-logit-softcapping output-multiplier-scale post-norm query-pre-attn-scalar scale-depth "
        "scale-emb share-kvstates interleave-sliding-window sliding-window enable-mhc hc-eps hc-mult "
        "hc-sinkhorn-iters swiglu-limit enable-mla-scale-q-lora enable-mla-scale-kv-lora mtp-spec",
        _OTHER_MODEL,
    ),
    *different("full-attention-interval", _GATED, ("0",)),
    *different("mamba-d-conv mamba-expand mamba-d-ssm", _OTHER_MODEL),
    *slower(
        "mamba-chunk-size use-triton-gdn use-fused-mhc use-triton-mhc use-triton-swiglu-limit", _OTHER_MODEL
    ),
    *different("use-global-aux-loss", "See global_aux_loss of --moe-router-load-balancing-type."),
    *same("init-norm-weight-in-fp32", "Of all norms, LayerNorms as well."),
    *different("rmsnorm-weight-in-fp32 input-layernorm-in-fp32", _NORM),
    *not_needed("no-enable-linear-qkv", "Query, key and value lie in one weight; the function is the same."),
    *not_needed("input-jitter", "Megatron has none unless --moe-input-jitter-eps asks for it."),
]
"""Flags for sizes and parts of a model."""

ATTENTION = [
    Row("--enable-dsa-indexer", "megatron", "With the value dsa.", "--experimental-attention-variant"),
    *renamed(
        {
            "index-n-heads": "dsa-indexer-n-heads",
            "index-head-dim": "dsa-indexer-head-dim",
            "index-topk": "dsa-indexer-topk",
            "indexer-loss-coeff": "dsa-indexer-loss-coeff",
            "use-fused-lightning-indexer-loss": "use-fused-lightning-indexer-kl-loss",
            "use-sparse-flash-attn": "use-fused-sparse-flash-attention",
            "enable-mla-absorb": "use-dsa-absorb",
            "index-topk-freq": "dsa-indexer-topk-freq",
            "index-skip-topk-offset": "dsa-indexer-skip-topk-offset",
            "index-topk-pattern": "dsa-indexer-topk-pattern",
            "index-share-for-mtp-iteration": "dsa-indexer-share-for-mtp",
            "no-use-sparse-c8-indexer": "no-dsa-indexer-rotate-activation",
        },
        switch="--enable-dsa-indexer",
    ),
    *renamed(
        {"apply-rope-no-in-complex": "dsa-indexer-rope-interleaved"},
        "The indexer then rotates even and odd dimensions in pairs, else half against half.",
        switch="--enable-dsa-indexer",
    ),
    *different(
        "kv-compress compress-ratios compress-rope-theta rope-theta rope-factor original-seq-len o-groups "
        "o-lora-rank sliding-window-size indexer-qk-quant-scheme",
        _V4,
    ),
    *not_needed("max-batch-size scale-fmt", "MindSpeed-LLM does not read it in training."),
    *not_needed("mla-mm-split", "Up-projections lie in one weight each; the function is the same."),
    *not_needed(
        "mla-fa-without-pad mla-fa-divide-qk padded-base-length",
        "How MindSpeed-LLM lays heads of unequal width out for its operator; here each operator pads where "
        "its device asks for it, and the result is the same.",
    ),
    *slower(
        "mla-up-proj-tp-overlap recompute-mla-up-proj mla-zero-memory mla-swap-core-attn-out",
        "Megatron's --recompute-modules mla_up_proj and --swap-attention save such memory.",
    ),
    *not_needed(
        "kv-head-repeat-before-uly-alltoall", "Heads are repeated where ranks need it, with the same result."
    ),
]
"""Flags for latent and sparse attention."""

TRAINING = [
    *different(
        "o2-gradient o2-optimizer",
        "Gradients or moments in bf16 are Megatron's --use-precision-aware-optimizer with "
        "--main-grads-dtype, "
        "--exp-avg-dtype and --exp-avg-sq-dtype.",
    ),
    *different("spec", "MindSpeed-LLM's layers."),
    *renamed(
        {"mtp-mem-efficient-logits": "fused-linear-cross-entropy"},
        "The main loss is computed in chunks as well.",
    ),
    *slower("loss-chunk-size", "Memory of the loss only."),
    *slower("loss-compute-mode", "Memory of the loss only.", ("default",)),
    *slower("output-layer-slice-num", "Memory of the output layer only.", ("1",)),
    *not_needed(
        "no-shared-storage", "Megatron builds data indices once per machine or once in all by itself."
    ),
    *not_needed("enable-share-memory", "How lengths of documents reach other ranks."),
    *not_needed(
        "handler-name tokenizer-padding-side pad-to-multiple-of prompt-type prompt-type-path", _PREPARED
    ),
    *different("no-shuffle padded-samples", "Megatron's data sets draw samples in their own order."),
    Row(
        "--enable-hf2mg-convert",
        "megatron",
        f"For {_MODELS}, with the folder of --load; weights of others are converted before.",
        LOAD,
    ),
    Row(
        "--enable-mg2hf-convert",
        "megatron",
        f"For {_MODELS}, with a folder below that of --save; others are exported afterwards.",
        SAVE,
    ),
    *not_needed(
        "model-type-hf hf-cfg-dir hf-save-dir mg-save-dir only-convert-last-checkpoint save-layer-by-layer",
        _CONVERTED,
    ),
    *different("load-checkpoint-loosely", "Megatron's --dist-ckpt-strictness says what may be missing."),
    *slower("profile-data-simplification profile-export-type", "Only what is recorded changes."),
    *slower("use-wandb", "Megatron's --wandb-project and --wandb-exp-name switch it on."),
    *slower(
        "distributed-optimizer-no-replica enable-elastic-training enable-hbmfault-repair "
        "enable-high-availability enable-worker-reboot",
        "Recovery from faults is not here; the training itself is the same.",
    ),
    *different("layerwise-disaggregated-training", "Split learning is not here."),
]
"""Flags for loss, optimizer, data and checkpoints."""

OTHER_TASKS = [
    *different(
        "stage is-instruction-dataset is-pairwise-dataset neat-pack pack no-pad-to-seq-lengths dpo-loss-type "
        "dpo-beta dpo-label-smoothing pref-ftx ref-model refer-model-iter",
        _TUNING,
    ),
    *different("lora-target-modules lora-load lora-modules-to-save lu-lora-final-layer-index", _LORA),
    *not_needed(
        "lora-r lora-alpha lora-fusion lora-ckpt-filter lora-register-forward-hook save-lora-to-hf "
        "lu-lora-lr "
        "lu-lora-lr-ratio",
        "Only LoRA reads it.",
    ),
    *not_needed(
        "alternative-prompt broadcast chain-of-thought eval-language evaluation-batch-size greedy "
        "instruction-template max-eval-samples no-chat-template origin-postprocess task-data-path "
        "cut-max-seqlen dataset-additional-keys full-shuffle-instruction-dataset no-cut-token add-eos-token "
        "hf-chat-template history-turns max-length max-new-tokens task temperature top-k top-p use-kv-cache",
        _TUNING_ONLY,
    ),
    *not_needed(
        "append-eod cache-dir dataset-dir dataset-impl datasets drop-thinking enable-thinking "
        "hf-datasets-params interleave-probs json-keys keep-newlines map-keys max-samples merge-group-keys "
        "mix-strategy n-subs output-prefix overwrite-cache pad-vocab-size-to reasoning-effort reward-tokens "
        "script-data-dir split-sentences streaming workers",
        _PREPARED,
    ),
]
"""Flags for fine-tuning, inference, evaluation and data preparation."""

LLM = [*MODEL, *ATTENTION, *TRAINING, *OTHER_TASKS]
