"""Dense and latent attention without Transformer Engine, on context parallel ranks and on one."""

from __future__ import annotations

from mindspeed_dsa.context_parallel.algorithms import ALGORITHM, MEGATRON_FLAGS, ULYSSES_DEGREE
from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature, Flag
from mindspeed_dsa.features.attention.dense_context_parallel.options import Options, wanted
from mindspeed_dsa.features.attention.dense_context_parallel.validation import (
    check_dense_attention,
    check_flash_attention,
    flash_wanted,
    without_mask,
)
from mindspeed_dsa.megatron.configuration import validate
from mindspeed_dsa.megatron.dsa import FIXES, MLA, megatron_flag
from mindspeed_dsa.patches.spec import Patch

_CORE = "megatron.core.transformer.dot_product_attention:DotProductAttention"
_IMPL = "mindspeed_dsa.features.attention.dense_context_parallel"
_LOCAL = f"{FIXES}.local_provider.modules"
_FLAGS = (
    ALGORITHM,
    ULYSSES_DEGREE,
    *MEGATRON_FLAGS,
    EXPERIMENTAL_ATTENTION_VARIANT,
    Flag("--multi-latent-attention", "Megatron's own flag.", megatron=True),
    megatron_flag("--transformer-impl"),
)

FEATURE = Feature(
    name="dense-context-parallel",
    summary="Ring, exchanged heads, or both for dense and latent attention, without Transformer Engine.",
    flags=_FLAGS,
    active=wanted,
    when="latent attention on Megatron's own modules (--multi-latent-attention, --transformer-impl local), "
    "and for --context-parallel-size above 1, both without --experimental-attention-variant dsa",
    options=Options.of,
    rewrite=without_mask,
    validate=validate(check_dense_attention, Options.of),
    doc="dense-context-parallel.md",
    patches=(
        Patch(
            f"{_CORE}.__init__",
            "wrap",
            f"{_IMPL}.core_attention:build_for_context_parallel",
            "Megatron's own attention refuses context parallelism, and to be built for latent attention",
            params=("config", "layer_number", "attn_mask_type", "attention_type"),
        ),
        Patch(
            f"{_CORE}.forward",
            "wrap",
            f"{_IMPL}.core_attention:attend_with_other_ranks",
            "Megatron's own attention sees its own rank's rows only",
            params=("query", "key", "value", "attention_mask", "attn_mask_type", "packed_seq_params"),
        ),
        Patch(
            f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_IMPL}.latents:carry_latents",
            "latents are a hundredth of the keys and values that Megatron makes of them for all heads",
            params=("hidden_states", "packed_seq_params"),
            versions=">=0.16",
        ),
        Patch(
            f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_IMPL}.latents:carry_latents_in_three",
            "latents are a hundredth of the keys and values that Megatron makes of them for all heads",
            params=("hidden_states", "packed_seq_params"),
            versions="<0.16",
        ),
        Patch(
            f"{MLA}:HAVE_TE",
            "value",
            f"{_LOCAL}:transformer_engine_is_usable",
            "MLA assumes that Transformer Engine is available and fails in an isinstance check",
            versions=">=0.16,<0.17",
            factory=True,
        ),
        Patch(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            "wrap",
            "mindspeed_dsa.megatron.local_norms:norm_for_every_setting",
            "the PyTorch norms are rejected with sequence parallelism and zero-centered gamma",
            params=("config", "hidden_size", "eps"),
            versions=">=0.12.1,<0.21",
        ),
    ),
)

FLASH = Feature(
    name="flash-attention",
    summary="Dense attention by one operator, which holds no scores, without Transformer Engine.",
    flags=(
        Flag(
            "--use-flash-attn",
            "Megatron's own flag, which acts on none of its own modules.",
            megatron=True,
        ),
        *_FLAGS,
    ),
    active=flash_wanted,
    rewrite=without_mask,
    validate=check_flash_attention,
    doc="flash-attention.md",
    patches=(
        Patch(
            f"{_CORE}.__init__",
            "wrap",
            f"{_IMPL}.core_attention:build_for_the_operator",
            "Megatron's own attention holds the scores of all pairs",
            params=("config", "layer_number", "attn_mask_type", "attention_type"),
        ),
        Patch(
            f"{_CORE}.forward",
            "wrap",
            f"{_IMPL}.core_attention:attend_with_other_ranks",
            "Megatron's own attention holds the scores of all pairs",
            params=("query", "key", "value", "attention_mask", "attn_mask_type", "packed_seq_params"),
        ),
    ),
)
FEATURES = (FEATURE, FLASH)
