"""Table of verdicts on the flags of MindSpeed core, including flags of older releases."""

from __future__ import annotations

from mindspeed_dsa.tools.migrate.job import Row, different, kept, not_needed, renamed, same, slower

_OPERATOR = "The attention operator is chosen by device and shape here."
_LAUNCHER = "The launcher's: it stands before the script on the command line."
_SEARCH = "Automatic search is not here; `python -m mindspeed_dsa plan --search` compares layouts beforehand."
_LISTS = "Only the search of --auto-settings and --automated-pipeline reads and writes it."
_PROFILE = (
    "Megatron's --profile with --use-pytorch-profiler has no such choice; only what is recorded changes."
)
_DEEPSPEED = "Of MindSpeed's removed DeepSpeed MoE layer; Megatron's MoE layer routes otherwise."
_TP_2D = "Two-dimensional tensor parallelism is not here; the same ranks share each layer in one dimension."
_ADAPTIVE = "Only adaptive context parallelism reads it, which is not served."
_ALIBI = "Megatron has no ALiBi."
_HCCL = "A buffer or mode of HCCL, which its own environment variables set as well."
_FAULT = "Recovery from faults is not here; the training itself is the same."
_COMPRESSED = "Lossless compression of what is kept is not here; memory only."
_QUANTISED = "Quantised training is not here."
_FP8 = "A detail of MindSpeed's own Transformer Engine."

PARALLEL = [
    *same("use-ascend-coc use-ascend-mc2"),
    Row(
        "--coc-parallel-num",
        "same",
        "Without a number the chunks are tuned here; MindSpeed's default of 1 switches the overlap off.",
        switch="--use-ascend-coc",
    ),
    *same(
        "coc-fused-kernel",
        "On CUDA PyTorch's fused operators, not MindSpeed's ATB ones.",
        switch="--use-ascend-coc",
    ),
    *not_needed("coc-mode", "One implementation; 0, which switches the overlap off, omits --use-ascend-coc."),
    *slower(
        "tp-2d tp-x tp-y enable-overlap-ag-with-matmul enable-overlap-matmul-with-rs "
        "enable-backward-overlap-ag-with-matmul use-nd-matmul nd1-dim1-size nd2-dim1-size",
        _TP_2D,
    ),
    *slower("unaligned-linear", "Sizes that ranks do not divide are not served; Megatron refuses them."),
    Row(
        "--context-parallel-algo",
        "same",
        "Without it Megatron's --cp-comm-type decides: a ring by default, as in MindSpeed.",
        refused=dict.fromkeys(
            ("adaptive_cp_algo", "hybrid_adaptive_cp_algo"),
            "Adaptive context parallelism is not here.",
        ),
        switch="--context-parallel-size",
    ),
    *same("ulysses-degree-in-cp", switch="--context-parallel-size"),
    *not_needed(
        "use-cp-send-recv-overlap use-fused-ring-attention-update megatron-cp-in-bnsd",
        "The ring here always sends ahead, and updates its result in one step.",
    ),
    *slower("cp-window-size", "A ring inside of the ring is not here; one ring computes the same.", ("1",)),
    *slower(
        "context-parallel-kv-cache-policy context-parallel-cache-interval use-ulysses-allgather-kv",
        "Other traffic for the same result; for DSA, --cp-keep-gathered keeps gathered keys until backward.",
    ),
    *slower(
        "adaptive-cp-only-reschedule adaptive-cp-without-coarse adaptive-cp-dynamic-attn-mask "
        "adaptive-cp-manually-set-mask-list attention-mask-on-cpu",
        _ADAPTIVE,
    ),
    *different("attention-mask-type", "Context parallel attention is causal here.", ("causal",)),
    *same("schedules-method"),
    *same("dualpipev-dw-detach", switch="--schedules-method"),
    *same("recompute-in-bubble recompute-in-advance"),
    *kept("pipeline-model-parallel-layout"),
    *slower(
        "optimize-send-recv-comm optimize-vpp-send-recv-comm",
        "Stages exchange as Megatron's schedules do.",
    ),
    *different(
        "use-multiparameter-pipeline-model-parallel",
        "Megatron's stages hand on one tensor; a model with several needs them.",
    ),
    *different(
        "variable-seq-lengths",
        "No flag of Megatron announces sequences of several lengths to its pipeline.",
    ),
    *slower("use-nanopipe use-nanopipe-swap", "A schedule that MindSpeed has given up; Megatron's are used."),
    *slower(
        "layerzero layerzero-config enable-zero3",
        "Sharded weights are Megatron's --use-megatron-fsdp or --use-torch-fsdp2.",
    ),
    *same(
        "fsdp2-config-path",
        "Keys that are not served, or are at odds with the job, are refused by name.",
        switch="--use-torch-fsdp2",
    ),
    *slower("reset-bucket-group-order async-log-allreduce", "The order of communication only."),
    *not_needed("param-and-grad-buffer-pad", "Alignment of buffers; NPUs take Megatron's as they are."),
    Row("--disable-gloo-group", "megatron", name="--disable-gloo-process-groups"),
    *not_needed("hccl-slice-size", "The size of a checkpoint's messages; Megatron's own saving needs none."),
    *slower(
        "hccl-group-buffer hccl-group-buffer-adaptive hccl-ep-group-buffer-adaptive-factor hccl-op-mode "
        "aiqos aiqos-enable-roce aiqos-mode aiqos-schedule",
        _HCCL,
    ),
    *different("dist-train", "Several models on separate devices are not served."),
]
"""Flags for tensor, context, pipeline and data parallelism."""

MEMORY = [
    *same("reuse-fp32-param swap-optimizer swap-attention virtual-optimizer"),
    *same("swap-optimizer-times", switch="--swap-optimizer"),
    *same("swap-modules", "Only self_attention by default.", switch="--swap-attention"),
    *same("recompute-activation-function recompute-norm"),
    *same("recompute-activation-function-num-layers", switch="--recompute-activation-function"),
    *same("recompute-norm-num-layers", switch="--recompute-norm"),
    *slower(
        "enable-recompute-layers-per-pp-rank",
        "--recompute-num-layers counts layers of each virtual stage; more or fewer layers are recomputed.",
    ),
    *slower("smart-swap swap-layer-input", "Other ways of swapping activations; --swap-attention is one."),
    *slower(
        "adaptive-recompute-device-size adaptive-recompute-device-swap adaptive-recompute-profiling-step "
        "adaptive-memory-optimization moe-adaptive-recompute-activation "
        "moe-adaptive-recompute-activation-scale",
        "What is recomputed is not chosen by itself; give Megatron's --recompute-* flags.",
    ),
    *slower("compress-activation compress-optimizer compress-dense", _COMPRESSED, ("disable", "")),
    *slower("moe-zero-memory moe-zero-memory-num-layers", "Memory only.", ("disable",)),
    *slower("moe-unperm2-mem-optim-swap", "Memory only."),
    *slower("automated-pipeline automated-pipeline-perf save-memory-ratio", _SEARCH),
    *not_needed(
        "recompute-module-list optimized-mbs-list optimized-mbs-mode "
        "pp-schedule-list recompute-type mbs-idx prof-file",
        _LISTS,
    ),
]
"""Flags for memory: recomputation, swapping, optimizer state."""

MOE = [
    *same("moe-alltoall-overlap-comm moe-fb-overlap balanced-moe-experts moe-tp-extend-ep"),
    *same("balanced-moe-hot-expert-num", switch="--balanced-moe-experts"),
    *not_needed("trans-hot-expert-group-num", "Experts travel in one exchange here."),
    *not_needed("moe-permutation-async-comm", "Counts of tokens are exchanged without waiting in any case."),
    *same(
        "gemm-gradient-accumulation-fusion",
        "Dense linear layers; --no-gradient-accumulation-fusion still switches them off. Grouped experts add "
        "their weight gradients where Megatron accumulates them in any case.",
    ),
    Row("--use-fused-moe-token-permute-and-unpermute", "megatron", name="--moe-permute-fusion"),
    Row(
        "--n-shared-experts",
        "megatron",
        "The number times the width of one expert.",
        "--moe-shared-expert-intermediate-size",
    ),
    *slower(
        "moe-allgather-overlap-comm moe-alltoall-mc2 moe-bmm-mc2",
        "Another overlap for the same result; --moe-alltoall-overlap-comm is one.",
    ),
    *slower(
        "enable-expert-placement enable-fine-grained-expert-placement expert-placement-freq "
        "fine-grained-expert-placement-thre",
        "Experts do not move during a run; --moe-expert-placement auto places them by a recorded load.",
    ),
    *slower("print-expert-load", "--moe-router-load-report DIR writes the same numbers to a file."),
    *different(
        "fix-router", "Fixed routing is not here; Megatron's --moe-router-force-load-balancing is random."
    ),
    *different(
        "moe-train-capacity-factor moe-use-sinkhorn noisy-gate-policy no-use-rts moe-no-drop "
        "moe-dynamic-padding",
        _DEEPSPEED,
    ),
    *different("moe-model-type", _DEEPSPEED, ("megatron_moe",)),
    *slower(
        "use-pipe-experts pipe-experts-multi-data pipe-experts-multi-stream ampipe-degree "
        "ampipe-tp-sp-comm-overlap enable-token-rearrange-opt",
        "Of MindSpeed's removed DeepSpeed MoE layer, for the same result.",
    ),
    *different("expert-interval", "Megatron's --moe-layer-freq says which layers have experts.", ("1",)),
]
"""Flags for experts and routers."""

ATTENTION = [
    *kept(
        "experimental-attention-variant",
        "Megatron's own flag; releases that lack DSA get it from this library.",
    ),
    *same(
        "use-dsa-absorb use-fused-lightning-indexer use-fused-sparse-flash-attention "
        "use-fused-lightning-indexer-kl-loss",
        "Each works alone here; --use-fused-dsa means all four.",
    ),
    *renamed(
        {
            "multi-head-latent-attention": "multi-latent-attention",
            "qk-rope-head-dim": "qk-pos-emb-head-dim",
            "qk-nope-head-dim": "qk-head-dim",
        }
    ),
    *kept("q-lora-rank kv-lora-rank v-head-dim add-qkv-bias"),
    *same("use-fused-rmsnorm use-fused-rotary-pos-emb"),
    *same("use-fused-swiglu", switch="--swiglu"),
    *not_needed("use-fusion-attn-v2", _OPERATOR),
    *not_needed("shape-order", "The memory layout of MindSpeed's attention operator."),
    *not_needed("sparse-mode", "How MindSpeed's attention operator is told that attention is causal."),
    *not_needed(
        "pre-tockens next-tockens", "A window of MindSpeed's attention operator that covers all keys."
    ),
    *different("fix-sub-seq-length", "For tests of MindSpeed's packed documents.", ("-1",)),
    *different(
        "alibi-fusion-attn-type alibi-diagonal-opposite square-alibi-mask fill-neg-inf",
        _ALIBI,
    ),
    *different("add-dense-bias", "Megatron has one --add-bias-linear for all linear layers."),
    *not_needed("skip-bias-add", "Megatron's layers add the bias where it is fused, with the same result."),
    *renamed({"yarn-scaling-factor": "rotary-scaling-factor"}),
    *not_needed(
        "rope-scaling-type rope-scaling-mscale rope-scaling-mscale-all-dim rope-scaling-beta-fast "
        "rope-scaling-beta-slow rope-scaling-original-max-position-embeddings",
        "Only --rope-scaling-type yarn or llama3 reads it.",
    ),
    *different("noop-layers pipeline-num-transformer-layers num-layer-list", "A layout of layers."),
]
"""Flags for attention and models."""

TRAINING = [
    *not_needed("optimization-level", "Each feature has its switch; what a platform needs is always on."),
    Row(
        "--optimizer-selection",
        "not needed",
        "Megatron's --optimizer decides; its Adam is Transformer Engine's, Apex' or else PyTorch's, whose "
        "step is one operator on NPUs (--fused-adam).",
        refused={"fused_ema_adamw": "Averaged weights are not here."},
    ),
    *different("use-ema", "Averaged weights are not here."),
    *not_needed("ema-decay", "Only the optimizer fused_ema_adamw reads it."),
    *kept(
        "apply-wd-to-qk-layernorm muon-momentum muon-no-split-qkv muon-num-ns-steps muon-scale-mode "
        "muon-tp-mode muon-extra-scale-factor muon-fp32-matmul-prec muon-coefficient-type "
        "muon-scalar-optimizer muon-nesterov",
        "Megatron's own flag, in releases that have this optimizer.",
    ),
    *different("quant-states quant-grads", "Quantised optimizer states and gradients are not here."),
    Row(
        "--npu-deterministic",
        "megatron",
        "Megatron asks for NCCL_ALGO as well, and refuses --use-flash-attn and fused cross entropy with it.",
        "--deterministic-mode",
    ),
    Row("--op-cal-tflops", "megatron", name="--log-throughput"),
    *slower(
        "profile-level profile-record-shapes profile-save-path profile-with-cpu profile-with-memory "
        "profile-with-stack npu-datadump",
        _PROFILE,
    ),
    *kept("profile-ranks", "Megatron's own flag; without it Megatron profiles rank 0, MindSpeed all."),
    Row(
        "--ai-framework",
        "not needed",
        "PyTorch is the only one.",
        refused={"mindspore": "MindSpore is not served."},
    ),
    *different("auto-settings", "It runs a search in place of training. " + _SEARCH),
    *not_needed(
        "auto-settings-type auto-settings-work-dir auto-settings-ranks auto-settings-log-level target-nnodes",
        _LISTS,
    ),
    *not_needed("nnodes nproc-per-node node-rank master-addr master-port", _LAUNCHER),
    *not_needed("jit-compile", "A mode of torch_npu; `torch.npu.set_compile_mode` sets it."),
    *different("additional-config", "A file of MindSpeed's own model settings."),
    Row(
        "--tokenizer-type",
        "megatron",
        "Megatron's own flag; PretrainedFromHF is called HuggingFaceTokenizer.",
        values={"PretrainedFromHF": "HuggingFaceTokenizer"},
        refused={"MagistralTokenizer": "Megatron has no MagistralTokenizer."},
    ),
    Row("--tokenizer-name-or-path", "megatron", name="--tokenizer-model"),
    *not_needed("tokenizer-not-use-fast", "Training reads tokens, not text."),
    *slower(
        "ttp-dump-dir ttp-dump-timeout-seconds ttp-enabled ttp-heartbeat-interval-ms "
        "ttp-heartbeat-timeout-ms "
        "ttp-max-dump-ckpt-to-keep ttp-max-missed-count ttp-save-optimizer ttp-save-rng ttp-server-ip "
        "ttp-server-port ttp-wait-dump-file-timeout",
        _FAULT,
    ),
    *different("qad-enable qat-scheme", _QUANTISED),
    *not_needed(
        "no-qad-enable qad-teacher-load kl-loss-weight kl-loss-reduction kl-temperature qat-quant-block-size",
        "Only quantised training reads it.",
    ),
    *slower("te-gmm-mode te-comparison-with-cpu te-comparison-with-bf16 fp8-reuse-quantized-weight", _FP8),
    *not_needed("no-use-gmm-fp8", "Experts' products are in fp8 only in Transformer Engine."),
]
"""Flags for optimizer, precision, data, profiling and launching."""

CORE = [*PARALLEL, *MEMORY, *MOE, *ATTENTION, *TRAINING]
