"""Register of Megatron-LM's options: a verdict for each, by area.

``options.py`` derives the refusals from the features' own checks, and runs the options that are served.
"""

from __future__ import annotations

from dataclasses import dataclass

SERVED, UNAFFECTED, NOT_RUN = "served", "unaffected", "not run"


@dataclass(frozen=True)
class Row:
    """Options with one verdict.

    Attributes:
        flags: flags, or patterns of flags, separated by blanks.
        verdict: :data:`SERVED`, :data:`UNAFFECTED` or :data:`NOT_RUN`.
        note: reason; for :data:`SERVED` a key of :data:`OPTIONS`, or other tests.
        words: command lines that the features' checks see, separated by ``|``. Without them, each switch and
            each choice of ``flags`` by itself.
    """

    flags: str
    verdict: str
    note: str
    words: str = ""


PAIRS = "[pairs of features](pairs.md)"
LAYOUTS = "[parallel layouts](parity.md)"
JOB = "every job"
_ENGINE, _CUDA, _NCCL = "needs Transformer Engine", "needs a GPU", "needs NCCL"

OPTIONS: dict[str, str] = {
    "sigmoid router": (
        "--moe-router-score-function sigmoid --moe-router-num-groups 2 --moe-router-group-topk 1 "
        "--moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias "
        "--moe-router-bias-update-rate 0.01 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 "
        "--moe-router-dtype fp64 --moe-layer-freq ([0]*1+[1]*3) --moe-shared-expert-gate "
        "--moe-per-layer-logging"
    ),
    "softmax router": (
        "--moe-router-pre-softmax --moe-expert-capacity-factor 2.0 --moe-token-drop-policy position "
        "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01 --moe-router-dtype fp32"
    ),
    "optimizer": (
        "--adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-6 --weight-decay-incr-style linear "
        "--start-weight-decay 0.01 --end-weight-decay 0.1 --clip-grad 0.5 --lr-decay-style WSD "
        "--lr-wsd-decay-style cosine --lr-wsd-decay-iters 2 --lr-decay-iters 4 --lr-warmup-iters 1 "
        "--lr-warmup-init 1e-5 --min-lr 1e-5 --decoupled-lr 2e-3 --decoupled-min-lr 1e-4 "
        "--check-for-large-grads"
    ),
    "initial weights": (
        "--init-method-std 0.05 --embedding-init-method-std 0.03 "
        "--use-cpu-initialization --seed 7 --norm-epsilon 1e-6 --calculate-per-token-loss"
    ),
    "prediction": "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3",
    "latent attention": "--rope-type yarn --rotary-scaling-factor 4 --mscale 0.8 --mscale-all-dim 0.8",
    "buckets": (
        "--use-distributed-optimizer --ddp-num-buckets 3 --ddp-average-in-collective --no-align-grad-reduce "
        "--no-align-param-gather --ddp-pad-buckets-for-high-nccl-busbw --overlap-grad-reduce "
        "--overlap-param-gather --no-check-for-nan-in-loss-and-grad"
    ),
    "bf16": "--bf16 --grad-reduce-in-bf16 --disable-bf16-reduced-precision-matmul",
    "heads": (
        "--group-query-attention --num-query-groups 2 --attention-output-gate --qk-layernorm --add-qkv-bias "
        "--kv-channels 32 --rotary-percent 0.5 --rotary-base 5000 --rotary-seq-len-interpolation-factor 2 "
        "--attention-softmax-in-fp32 --apply-wd-to-qk-layernorm --use-rope-scaling --rope-scaling-factor 4"
    ),
    "layers": "--normalization LayerNorm --apply-layernorm-1p --quick-geglu --glu-linear-offset 1.0 "
    "--activation-func-clamp-value 7.0",
    "windows": (
        "--group-query-attention --num-query-groups 2 --window-size 16,0 --window-attn-skip-freq 2 "
        "--softmax-type learnable --no-rope-freq 2 --rotary-interleaved"
    ),
    "squared ReLU": "--squared-relu",
}
"""Options that a job has together."""

_FIRST = ("sigmoid router", "optimizer", "initial weights", "prediction", "latent attention")
_SECOND = ("softmax router", "buckets", "bf16", "squared ReLU")
_THIRD = ("heads", "windows", "layers")
SETS = (_FIRST, _SECOND, _THIRD)
"""Keys of :data:`OPTIONS` that train together."""
_MEMORY = (
    "--swap-attention --swap-attention-min-bytes 1 --recompute-norm --recompute-activation-function "
    "--fused-operators all"
)
_EXPERTS = "--moe-alltoall-overlap-comm --moe-grouped-gemm --moe-permute-fusion"
_FUSED = "--use-fused-dsa --two-streams --fused-linear-cross-entropy"
_BALANCED = "--balanced-moe-experts --balanced-moe-matmul-rate 1e-6 --balanced-moe-link-rate 1e6"
_HALVES = "--moe-batch-overlap --moe-batch-overlap-always --moe-grouped-gemm"
_V = "--schedules-method dualpipev --recompute-norm"
_CHUNKS = "--use-ascend-coc --coc-parallel-num 2 --moe-tp-extend-ep"
JOBS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("", _FIRST, f"{_MEMORY} {_FUSED} --swap-optimizer"),
    ("", _SECOND, f"{_MEMORY} {_FUSED} --virtual-optimizer all --init-norm-weight-in-fp32"),
    ("", _THIRD, f"{_MEMORY} --swap-optimizer --use-flash-attn"),
    ("EP", _FIRST, f"{_EXPERTS} {_BALANCED}"),
    ("EP", _SECOND, f"{_EXPERTS} {_BALANCED} --reuse-fp32-param"),
    ("EP", _THIRD, f"{_EXPERTS} {_BALANCED}"),
    ("EP", _FIRST, f"--moe-fb-overlap {_FUSED}"),
    ("EP", _SECOND, "--moe-fb-overlap"),
    ("EP", _THIRD, "--moe-fb-overlap"),
    ("EP", _FIRST, _HALVES),
    ("EP", _SECOND, _HALVES),
    ("EP", _THIRD, _HALVES),
    ("PP", _FIRST, f"{_V} --use-fused-dsa"),
    ("PP", _SECOND, f"{_V} --use-fused-dsa"),
    ("PP", _THIRD, _V),
    ("PP", _FIRST, "--split-backward"),
    ("PP", _SECOND, "--split-backward"),
    ("PP", _THIRD, "--split-backward"),
    ("TP", _FIRST, f"{_CHUNKS} --use-fused-dsa"),
    ("TP", _SECOND, f"{_CHUNKS} --use-fused-dsa"),
    ("TP", _THIRD, _CHUNKS),
    ("CP", _FIRST, "--use-fused-dsa --cp-block-rows 8 --cp-keep-gathered"),
    ("CP", _SECOND, "--use-fused-dsa --cp-block-rows 8 --cp-keep-gathered"),
    ("CP", ("heads", "layers"), "--context-parallel-algo ulysses_cp_algo"),
    ("DP", _FIRST, "--use-torch-fsdp2 --swap-optimizer"),
    ("DP", ("softmax router", "bf16", "squared ReLU"), "--use-torch-fsdp2 --swap-optimizer"),
    ("DP", _THIRD, "--use-torch-fsdp2 --swap-optimizer"),
)
"""Place of a job, in terms of ``pairs.py``; keys of :data:`OPTIONS`; flags of features."""
DENSE = ("heads", "windows")
"""Keys of :data:`OPTIONS` for a model with grouped heads and dense attention."""


def _row(flags: str, verdict: str, note: str, words: str = "") -> Row:
    return Row(" ".join(flags.split()), verdict, note, words)


def _of(key: str, *more: str) -> Row:
    named = [word for word in OPTIONS[key].split() if word.startswith("--")]
    return Row(" ".join([*named, *more]), SERVED, key, OPTIONS[key])


_SIZES = """--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --seq-length
--max-position-embeddings --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim
--num-experts --moe-ffn-hidden-size --moe-router-topk --moe-shared-expert-intermediate-size --dsa-indexer-*
--multi-latent-attention --experimental-attention-variant --make-vocab-size-divisible-by --vocab-size
--padded-vocab-size --no-pad-vocab-size --disable-pad-vocab-size --encoder-num-layers --decoder-num-layers
--encoder-seq-length --decoder-seq-length --untie-embeddings-and-output-weights --swiglu
--disable-bias-linear --position-embedding-type --use-rotary-position-embeddings --hidden-dropout
--no-dsa-indexer-* --disable-dsa-indexer-*"""

AREAS: dict[str, tuple[Row, ...]] = {
    "Sizes, layouts and steps": (
        _row(_SIZES, SERVED, f"{JOB}, {LAYOUTS}", "-"),
        _row(
            """--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
            --expert-model-parallel-size --expert-tensor-parallel-size --sequence-parallel
            --num-virtual-stages-per-pipeline-rank --num-layers-per-virtual-pipeline-stage
            --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
            --pipeline-model-parallel-layout --cp-comm-type --microbatch-group-size-*
            --model-parallel-size --encoder-*-parallel-size --pipeline-model-parallel-split-rank""",
            SERVED,
            LAYOUTS,
            "-",
        ),
        _row(
            """--micro-batch-size --global-batch-size --batch-size --train-iters --train-samples --lr --split
            --mock-data --transformer-impl --distributed-backend --no-gradient-accumulation-fusion
            --no-masked-softmax-fusion --no-bias-*-fusion --no-rope-fusion --deterministic-mode""",
            SERVED,
            JOB,
            "-",
        ),
        _row("--rampup-batch-size", SERVED, "`tests/megatron/test_batches.py`", "--rampup-batch-size 8 8 16"),
        _row(
            "--step-batch-size-schedule --eval-global-batch-size --eval-micro-batch-size",
            SERVED,
            "`tests/megatron/test_batches.py`",
            "--step-batch-size-schedule 0:16 | --eval-micro-batch-size 1 --eval-global-batch-size 16",
        ),
        _row(
            "--account-for-*-in-pipeline-split --mtp-standalone --fake-process-group",
            UNAFFECTED,
            "features read the layers that Megatron gives to a stage",
        ),
        _row(
            "--use-tp-pp-dp-mapping --hierarchical-context-parallel-sizes --lazy-mpu-init",
            UNAFFECTED,
            "features ask Megatron for its groups",
            "--use-tp-pp-dp-mapping",
        ),
        _row(
            "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank",
            NOT_RUN,
            _ENGINE,
            "--hybrid-context-parallel",
        ),
        _row(
            """--decrease-batch-size-if-needed --phase-transition-iterations --skip-train --eval-iters
            --eval-interval --full-validation --multiple-validation-sets --start-eval-at-iter
            --train-sync-interval --empty-unused-memory-level""",
            UNAFFECTED,
            "Megatron's training loop",
        ),
        _row("--iterations-to-skip", UNAFFECTED, "Megatron's training loop", "--iterations-to-skip 5"),
    ),
    "Attention": (
        _of("heads"),
        _of("windows"),
        _row("--softmax-type", SERVED, "windows", "--softmax-type off-by-one"),
        _of("latent attention"),
        _row("--attention-dropout", UNAFFECTED, "dense attention only", "--attention-dropout 0.1"),
        _row(
            "--apply-query-key-layer-scaling --qk-l2-norm --rope-scaling-factor --*yarn* --mrope-section",
            UNAFFECTED,
            "query, key and scale as Megatron makes them",
        ),
        _row(
            "--no-position-embedding --relative-attention-*",
            UNAFFECTED,
            "embeddings, outside of all features",
        ),
        _row(
            "--qk-clip* --log-max-attention-logit", NOT_RUN, _ENGINE, "--qk-clip | --log-max-attention-logit"
        ),
        _row(
            """--attention-backend --flash-attention-version --batch-invariant-* --mla-down-proj-fusion
            --use-kitchen-attention --kitchen-* --use-flash-attn""",
            NOT_RUN,
            _ENGINE,
        ),
        _row("--dsa-kernel-backend", NOT_RUN, "tilelang and cudnn need a GPU"),
        _row("--cache-mla-latents --flash-decode", UNAFFECTED, "inference"),
        _row(
            "--linear-* --gdp-*",
            UNAFFECTED,
            "layers of linear attention, which have no features",
            "--linear-conv-kernel-dim 4",
        ),
        _row(
            "--reset-position-ids --reset-attention-mask --eod-mask-loss --dataloader-inter-document-masking "
            "--no-create-attention-mask-in-dataloader",
            UNAFFECTED,
            "batches, as Megatron makes them",
        ),
    ),
    "Experts": (
        _of("sigmoid router"),
        _of("softmax router"),
        _row(
            "--moe-router-load-balancing-type",
            UNAFFECTED,
            "the router's losses, on whole microbatches",
            " | ".join(
                f"--moe-router-load-balancing-type {name}"
                for name in ("aux_loss", "sinkhorn", "none", "global_aux_loss", "quantile_balancing")
            ),
        ),
        _row(
            """--moe-router-force-* --moe-router-quantile-* --moe-input-jitter-eps --moe-enable-routing-replay
            --save-tokens-per-expert-interval --moe-pad-experts-for-*""",
            UNAFFECTED,
            "inside the router",
        ),
        _row(
            "--moe-routing-trace-*",
            UNAFFECTED,
            "hooks of routers, which record a routing for each call",
            "--moe-routing-trace-path trace",
        ),
        _row("--moe-token-dispatcher-type", SERVED, PAIRS, "--moe-token-dispatcher-type allgather"),
        _row(
            """--moe-flex-dispatcher-* --moe-enable-deepep --moe-deepep-* --moe-hybridep-* --moe-ncclep-*
            --moe-permute-fusion-into-hybridep --moe-expert-rank-capacity-factor --moe-dispatch-fwd-dtype
            --moe-combine-bwd-dtype""",
            NOT_RUN,
            "needs DeepEP, HybridEP or NCCL",
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep | "
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
        ),
        _row("--moe-grouped-gemm --moe-permute-fusion --moe-shared-expert-overlap", SERVED, PAIRS),
        _row(
            "--moe-pad-expert-input-to-capacity --moe-apply-probs-on-input",
            UNAFFECTED,
            "inside the dispatcher and the experts",
        ),
        _row(
            """--moe-latent-size --moe-router-fusion --moe-router-padding-for-* --moe-paged-stash*
            --moe-single-grouped-* --moe-use-grouped-tensor --moe-*glu-interleave-size
            --use-grouped-gemm-for-* --use-transformer-engine-op-fuser --high-priority-a2a-comm-stream""",
            NOT_RUN,
            _ENGINE,
        ),
        _row(
            "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --ep-overlap-early-attn-memory-release "
            "--overlap-dispatch-backward-with-experts-wgrad",
            NOT_RUN,
            "needs a GPU; `--moe-fb-overlap` and `--split-backward` take their place",
        ),
        _row(
            "--moe-use-upcycling --moe-upcycling-granularity --moe-use-legacy-grouped-gemm --moe-extended-tp",
            UNAFFECTED,
            "before the first step, or removed",
        ),
    ),
    "Other layers": (
        _of("layers"),
        _of("squared ReLU"),
        _row(
            """--openai-gelu --onnx-safe --apply-residual-connection-post-layernorm
            --no-persist-layer-norm --disable-clone-scatter-output-in-embedding
            --no-clone-scatter-output-in-embedding --disable-jit-fuser""",
            UNAFFECTED,
            "layers, which features call as they are",
        ),
        _row(
            "--use-te-activation-func --use-fused-weighted-squared-relu --fused-residual-rmsnorm "
            "--te-precision-config-file",
            NOT_RUN,
            _ENGINE,
        ),
        _of("prediction"),
        _row(
            "--mtp-use-repeated-layer --mtp-detach-heads --mtp-hsm",
            UNAFFECTED,
            "prediction layers, which features call as they are",
        ),
        _row(
            "--cross-entropy-loss-fusion --cross-entropy-fusion-impl --output-logit-dtype "
            "--logits-save-* --logits-load-*",
            UNAFFECTED,
            "the loss, behind the last layer",
            "--cross-entropy-loss-fusion | --cross-entropy-loss-fusion --cross-entropy-fusion-impl te "
            "| --output-logit-dtype bf16 | --logits-save-dir x | --logits-load-dir x",
        ),
        _row(
            "--hybrid-* --is-hybrid-model --mamba-* --mtp-hybrid-override-pattern --spec "
            "--disable-mamba-mem-eff-path",
            NOT_RUN,
            "needs Mamba's kernels",
            "--is-hybrid-model | --hybrid-override-pattern M*M* | --hybrid-layer-pattern M*M*",
        ),
        _row("--fp16-lm-cross-entropy", UNAFFECTED, "no model of Megatron's core reads it", "-"),
        _row(
            "--enable-mhc-connections --mhc-*",
            NOT_RUN,
            "only on Megatron's main branch",
        ),
        _row(
            "--heterogeneous-layers-config-* --use-legacy-models",
            UNAFFECTED,
            "models without features",
            "--use-legacy-models",
        ),
        _of("initial weights"),
        _row(
            "--no-initialization --init-method-xavier-uniform --init-model-with-meta-device "
            "--data-parallel-random-init --use-mup --mup-*",
            UNAFFECTED,
            "before the first step",
            "--no-initialization | --init-model-with-meta-device | --data-parallel-random-init | --use-mup",
        ),
        _row("--freeze-all-layers", UNAFFECTED, "which weights are trained"),
    ),
    "Optimizer": (
        _of("optimizer"),
        _row("--optimizer --sgd-momentum", SERVED, PAIRS, "--optimizer sgd"),
        _row(
            "--muon-* --lion-* --no-use-layer-wise-*",
            NOT_RUN,
            "needs emerging_optimizers",
            " | ".join(
                f"--optimizer {name}" for name in ("muon", "dist_muon", "lion", "soap", "adaptive_muon")
            ),
        ),
        _row(
            """--weight-decay --lr-warmup-* --lr-decay-* --lr-wsd-* --no-weight-decay-cond-type
            --override-opt*-param-scheduler --override-opt_param-scheduler --use-checkpoint-opt*
            --head-lr-mult --check-for-spiky-loss --warmup""",
            UNAFFECTED,
            "the schedule of learning rates",
            "-",
        ),
        _row(
            "--use-precision-aware-optimizer --main-*-dtype --exp-avg-*dtype",
            NOT_RUN,
            _ENGINE,
            "--use-precision-aware-optimizer",
        ),
        _row(
            """--optimizer-cpu-offload --optimizer-offload-fraction --overlap-cpu-optimizer-d2h-h2d
            --use-torch-optimizer-for-cpu-offload --no-pin-cpu-*""",
            NOT_RUN,
            _CUDA,
            "--optimizer-cpu-offload",
        ),
        _row("--optimizer-cuda-graph", NOT_RUN, _CUDA),
        _row(
            "--load-main-params-from-ckpt --log-params-norm --log-num-zeros-in-grad",
            UNAFFECTED,
            "reads weights of the optimizer",
        ),
    ),
    "Precision": (
        _of("bf16"),
        _row(
            "--fp32-residual-connection",
            NOT_RUN,
            "needs Transformer Engine, whose norms return bf16; Megatron's local norms return fp32",
            "--bf16 --fp32-residual-connection",
        ),
        _row(
            "--fp16 --loss-scale --initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis "
            "--accumulate-allreduce-grads-in-fp32",
            UNAFFECTED,
            "loss scales, which deferred gradients keep",
            "--fp16",
        ),
        _row(
            "--fp8-* --no-fp8-* --disable-fp8-* --fp4-* --first-last-layers-bf16 --num-layers-at-*-in-bf16 "
            "--keep-fp8-transpose-cache* --reuse-grad-buf-for-mxfp8-param-ag",
            NOT_RUN,
            _ENGINE,
            "--fp8-format hybrid | --fp4-format e2m1 | --fp8-output-proj",
        ),
    ),
    "Data parallelism": (
        _of("buckets"),
        _row("--use-torch-fsdp2", SERVED, PAIRS),
        _row("--torch-fsdp2-no-reshard-after-forward", UNAFFECTED, "FSDP2 itself"),
        _row(
            "--ddp-reduce-scatter-with-fp32-accumulation",
            NOT_RUN,
            "Megatron allows no `--ddp-average-in-collective` beside it",
        ),
        _row(
            """--ddp-bucket-size --no-gradient-reduce-div-fusion --disable-align-grad-reduce
            --ddp-param-name-patterns-* --check-weight-hash-*
            --num-distributed-optimizer-instances --overlap-param-gather-with-optimizer-step
            --distrib-optim-fully-reshardable-mem-efficient""",
            UNAFFECTED,
            "gradient buffers, which features fill as Megatron does",
        ),
        _row(
            """--use-megatron-fsdp --use-custom-fsdp --megatron-fsdp-* --fsdp-*
            --data-parallel-sharding-strategy --outer-dp-sharding-strategy --enable-full-sharding-in-hsdp
            --suggested-communication-unit-size --num-distributed-optimizer-instances""",
            NOT_RUN,
            _CUDA,
            "--use-megatron-fsdp | --num-distributed-optimizer-instances 2",
        ),
        _row(
            "--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards --gtp-*",
            NOT_RUN,
            _ENGINE,
            "--tensor-parallel-num-weight-shards 4 | --expert-tensor-parallel-num-weight-shards 4",
        ),
        _row(
            "--use-nccl-ub --use-sharp --sharp-enabled-group --nccl-* --disable-symmetric-registration "
            "--high-priority-stream-groups --create-all-gather-group",
            NOT_RUN,
            _NCCL,
            "--use-nccl-ub",
        ),
    ),
    "Tensor and pipeline parallelism": (
        _row(
            "--no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush "
            "--no-scatter-gather-tensors-in-pipeline --disable-async-tensor-model-parallel-allreduce "
            "--no-async-tensor-model-parallel-allreduce --pipeline-model-parallel-comm-backend "
            "--disable-gloo-process-groups",
            UNAFFECTED,
            "transfers of whole activations",
        ),
        _row("--use-ring-exchange-p2p", NOT_RUN, _CUDA),
        _row(
            "--tp-comm-* --no-tp-comm-* --disable-tp-comm-* --symmetric-ar-type",
            NOT_RUN,
            _ENGINE,
            "--tp-comm-overlap",
        ),
        _row(
            "--defer-embedding-wgrad-compute --wgrad-deferral-limit",
            NOT_RUN,
            "needs Apex",
            "--defer-embedding-wgrad-compute",
        ),
    ),
    "Memory": (
        _row(
            "--recompute-activations --recompute-granularity --recompute-method --recompute-num-layers "
            "--recompute-modules --moe-layer-recompute --checkpoint-activations "
            "--distribute-saved-activations --mlp-chunks-for-training",
            SERVED,
            PAIRS,
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 | "
            + " | ".join(
                f"--recompute-granularity selective --recompute-modules {name}"
                for name in (
                    "core_attn",
                    "moe_act",
                    "layernorm",
                    "mla_up_proj",
                    "mlp",
                    "moe",
                    "shared_experts",
                )
            ),
        ),
        _row(
            "--cpu-offloading-*",
            NOT_RUN,
            _ENGINE,
            "--cpu-offloading-num-layers 2",
        ),
        _row(
            """--fine-grained-activation-offloading --offload-modules --fine-grained-offloading-*
            --min-offloaded-tensor-size --activation-offload-fraction --delta-offload-bytes-across-pp-ranks
            --delay-offload-until-cuda-graph""",
            NOT_RUN,
            _ENGINE,
            "--fine-grained-activation-offloading",
        ),
        _row(
            """--cuda-graph-* --enable-cuda-graph --external-cuda-graph --te-rng-tracker""",
            NOT_RUN,
            _CUDA,
            "--enable-cuda-graph | --external-cuda-graph | --cuda-graph-impl local | "
            "--cuda-graph-impl transformer_engine",
        ),
    ),
}
"""Rows by area; a flag belongs to the first row that names it."""

OUTSIDE: dict[str, str] = {
    "Data and tokenizers": """--data-* --*-data-path --split --tokenizer-* --no-tokenizer-*
        --disable-tokenizer-* --legacy-tokenizer --vocab-* --merge-file
        --tiktoken-* --null-tokenizer-* --allow-ambiguous-pad-tokens
        --num-workers --num-dataset-builder-threads --dataloader-*
        --no-mmap-bin-files --mid-level-* --per-*-path --fim-* --sft*
        --chat-template --trust-remote-code --use-gigatoken
        --object-storage-cache-path --no-data-sharding
        --validation-set-names --short-seq-prob --mask-*
        --no-use-tokenizer* --disable-use-tokenizer* --s3-cache-path
        --use-one-sent-docs --use-same-sampling-seed-across-dp-ranks
        --sample-rate --verify-integrity""",
    "Checkpoints": """--save* --no-save* --load* --no-load* --ckpt-* --no-ckpt-*
        --disable-ckpt-* --*dist-ckpt* --async-* --non-persistent-*
        --persistent-save-interval --finetune --pretrained-checkpoint
        --use-*checkpoint-args --auto-detect-ckpt-format
        --exit-on-missing-checkpoint --use-persistent-ckpt-worker
        --*stream-ckpt-dequant --*strict-fsdp-dtensor-load
        --override-ckpt-iteration --replication* --enable-msc
        --disable-msc --disable-save-tokenizer-assets""",
    "Logging, profiling and debugging": """--log-* --no-log-* --disable-log-* --logging-level --tensorboard-*
        --wandb-* --one-logger-* --no-one-logger --profile*
        --*pytorch-profiler* --timing-* --no-barrier-* --*memory-history
        --memory-snapshot-path --record-shapes --nvtx-ranges --otel-*
        --*flight-recorder* --straggler-* --disable-straggler-*
        --gpu-sniff-test-interval --config-logger-dir --app-tag-*
        --dump-param-* --run-workload-* --result-rejected-*
        --error-injection-* --rerun-mode --manual-gc* --*manual-gc-eval
        --yaml-cfg --enable-experimental --use-mcore-models --test-mode""",
    "Restarts and faults": """--exit-* --adlr-* --inprocess-* --fault-injector-* --ft-*
        --calc-ft-* --enable-ft-* --distributed-timeout-* --local-rank""",
    "Inference and reinforcement learning": """--inference-* --no-inference-* --rl-* --no-rl-* --grpo-*
        --langrl-* --no-langrl-* --perform-rl-step --refit-method
        --*chunked-prefill --mlp-chunks-for-prefill
        --use-legacy-static-engine --decode-only-cuda-graphs
        --max-tokens-to-oom --num-speculative-tokens
        --output-bert-embeddings""",
    "Other models": """--bert-* --biencoder-* --ict-* --retriever-* --indexer-*
        --embedding-path --query-in-block-prob --dino-* --vision-*
        --swin-* --img-* --patch-dim --num-classes --num-channels
        --classes-fraction --iter-per-epoch --retro-*""",
}
"""Areas whose options change no step: patterns of flags, separated by blanks."""
