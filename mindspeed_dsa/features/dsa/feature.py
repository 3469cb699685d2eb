"""The switches of fused DSA, of the absorbed form, and of the warm-up stage."""

from __future__ import annotations

from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, WORDS, Feature, Flag, Requires
from mindspeed_dsa.features.dsa.validation import check_fused, check_stage
from mindspeed_dsa.megatron.dsa import (
    DSA,
    MLA,
    Options,
    absorb_wanted,
    fused_wanted,
    megatron_flag,
    warmup_wanted,
)
from mindspeed_dsa.patches.spec import Patch

_IMPL = "mindspeed_dsa.features.dsa.sparse"
_RELEASES = ">=0.16,<0.19"

USE_FUSED_DSA = Flag(
    "--use-fused-dsa",
    "DSA on fused operators: memory grows with the sequence, not with its square, and work with the selected "
    "keys. Switches on --use-dsa-absorb and the three --use-fused-* below; --no-use-dsa-absorb and so on "
    "use Megatron's code for one of them.",
)
ABSORB = Flag(
    "--use-dsa-absorb",
    "MLA in absorbed form, in which all heads share one latent key. 'auto' takes the faster form by length: "
    "by head up to topk tokens, on CPUs up to 17 x topk (in DeepSeek's widths), absorbed beyond; the log "
    "says which. Default: 'auto' under --use-fused-dsa, else 'off'; without a word 'on'.",
    kind="auto",
    choices=WORDS,
)
_SWITCHES = (
    USE_FUSED_DSA,
    ABSORB,
    Flag(
        "--use-fused-lightning-indexer",
        "Select keys with the fused operator, ties to the lowest position. Default: as --use-fused-dsa.",
        kind="auto",
    ),
    Flag(
        "--use-fused-sparse-flash-attention",
        "Attend to the selected keys with the fused operator. Default: as --use-fused-dsa.",
        kind="auto",
    ),
    Flag(
        "--use-fused-lightning-indexer-kl-loss",
        "Compute the indexer loss with the fused operator. Default: as --use-fused-dsa.",
        kind="auto",
    ),
)
_BACKEND = Flag(
    "--dsa-backend",
    "Implementation of the DSA operators; 'auto' selects the best one for the device and the shapes and "
    "logs why one is skipped; a named one that cannot run is an error.",
    kind="value",
    default="auto",
    choices=("auto", "reference", "chunked", "cpu", "triton", "npu"),
)
_CPU_BF16 = Flag(
    "--dsa-cpu-bf16",
    "How the DSA operators multiply bf16 on CPUs: 'native' as it is, 'widened' in fp32; 'auto' measures both "
    "once, takes the faster on all ranks and logs it, and widens under deterministic algorithms, which rule "
    "out a measured choice.",
    kind="value",
    default="auto",
    choices=("auto", "native", "widened"),
)
_FUSE_KL = Flag(
    "--dsa-fuse-kl-in-backward",
    "Collect the indexer loss's target inside the attention's backward pass, where the probabilities are "
    "recomputed anyway; the loss is logged from there.",
)
_STAGE = Flag(
    "--dsa-stage",
    "Stage of DSA training: 'warmup' trains only the indexer, with dense attention; 'sparse' trains all.",
    kind="value",
    default="sparse",
    choices=("sparse", "warmup"),
)

FUSED = Feature(
    name="fused-dsa",
    summary="DSA's attention path on fused operators: Lightning Indexer, Sparse Flash Attention, KL loss.",
    flags=(
        *_SWITCHES,
        _BACKEND,
        _CPU_BF16,
        _FUSE_KL,
        EXPERIMENTAL_ATTENTION_VARIANT,
        megatron_flag("--dsa-indexer-loss-coeff", float),
    ),
    active=fused_wanted,
    options=Options.of,
    validate=check_fused,
    on_finalize=f"{_IMPL}.core_attention:settle_bf16",
    doc="fused-dsa.md",
    patches=(
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_IMPL}.core_attention:fuse_core_attention",
            "Megatron's form holds sequence x sequence buffers per head and saves no work by sparsity",
            params=(
                "query",
                "key",
                "value",
                "attention_mask",
                "x",
                "qr",
                "attn_mask_type",
                "packed_seq_params",
            ),
            versions=_RELEASES,
            priority=-100,  # inside all wrappers that decide whether and when the forward runs
        ),
        Patch(
            f"{DSA}:DSAIndexer._compute_index_scores",
            "wrap",
            f"{_IMPL}.index_projection:tap_index_scores",
            "this release has no function that projects for the indexer and stops before the scores",
            params=("q", "weights", "k"),
            versions=">=0.16,<0.17",
        ),
        Patch(
            f"{DSA}:DSAIndexer._apply_rope",
            "wrap",
            f"{_IMPL}.index_projection:rotate_by_documents",
            "the indexer of these releases knows no packed documents",
            params=("x", "rotary_pos_emb", "mscale"),
            versions=_RELEASES,
        ),
    ),
)
ABSORBED = Feature(
    name="dsa-absorb",
    summary="MLA in absorbed form, so that sparse attention gathers one latent key for all heads.",
    flags=(ABSORB, USE_FUSED_DSA, EXPERIMENTAL_ATTENTION_VARIANT),
    active=absorb_wanted,
    options=Options.of,
    doc="dsa-absorb.md",
    patches=(
        Patch(
            f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_IMPL}.absorb:absorb_latent",
            "Megatron computes a key and a value for each head, which sparse attention would have to gather",
            params=("hidden_states", "packed_seq_params", "inference_context"),
            versions=_RELEASES,
            priority=-100,
        ),
    ),
)
WARMUP = Feature(
    name="dsa-stage",
    summary="Warm-up stage of DSA training: dense attention, dense indexer loss, only the indexer trained.",
    flags=(_STAGE, EXPERIMENTAL_ATTENTION_VARIANT, megatron_flag("--dsa-indexer-loss-coeff", float)),
    requires=Requires(versions={"megatron-core": _RELEASES}),
    active=warmup_wanted,
    options=Options.of,
    validate=check_stage,
    doc="dsa-stage.md",
    patches=(
        Patch(
            "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
            "wrap",
            f"{_IMPL}.warmup:freeze_all_but_indexers",
            "frozen parameters must be neither in gradient buffers nor in the optimizer",
            versions=_RELEASES,
        ),
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.forward",
            "wrap",
            f"{_IMPL}.warmup:layer_without_graph",
            "a frozen layer needs no activations in backward",
            versions=_RELEASES,
        ),
    ),
)
FEATURES = (FUSED, ABSORBED, WARMUP)
