"""Dense attention that holds no scores: ``--use-flash-attn`` without Transformer Engine."""

from __future__ import annotations

from mindspeed_dsa.context_parallel.algorithms import ALGORITHM, MEGATRON_FLAGS, ULYSSES_DEGREE
from mindspeed_dsa.declarations import EXPERIMENTAL_ATTENTION_VARIANT, Feature, Flag
from mindspeed_dsa.features.attention.dense_context_parallel.validation import without_mask
from mindspeed_dsa.features.attention.flash_attention.validation import check_flash_attention, wanted
from mindspeed_dsa.features.attention.repairs import megatron_flag
from mindspeed_dsa.patches.spec import Patch

_CORE = "megatron.core.transformer.dot_product_attention:DotProductAttention"
_IMPL = "mindspeed_dsa.features.attention"

FEATURE = Feature(
    name="flash-attention",
    summary="Dense attention by one operator, which holds no scores, without Transformer Engine.",
    flags=(
        Flag(
            "--use-flash-attn",
            "Megatron's own flag, which acts on none of its own modules.",
            megatron=True,
        ),
        ALGORITHM,
        ULYSSES_DEGREE,
        *MEGATRON_FLAGS,
        EXPERIMENTAL_ATTENTION_VARIANT,
        Flag("--multi-latent-attention", "Megatron's own flag.", megatron=True),
        megatron_flag("--transformer-impl"),
    ),
    active=wanted,
    rewrite=without_mask,
    validate=check_flash_attention,
    doc="flash-attention.md",
    patches=(
        Patch(
            f"{_CORE}.__init__",
            "wrap",
            f"{_IMPL}.flash_attention.core_attention:build_for_the_operator",
            "Megatron's own attention holds the scores of all pairs",
            params=("config", "layer_number", "attn_mask_type", "attention_type"),
        ),
        Patch(
            f"{_CORE}.forward",
            "wrap",
            f"{_IMPL}.dense_context_parallel.core_attention:attend_with_other_ranks",
            "Megatron's own attention holds the scores of all pairs",
            params=("query", "key", "value", "attention_mask", "attn_mask_type", "packed_seq_params"),
        ),
    ),
)
