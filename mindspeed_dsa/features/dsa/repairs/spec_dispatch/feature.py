"""Selection of DSA: Megatron's spec functions support the variant, for the decoder and for MTP."""

from __future__ import annotations

from mindspeed_dsa.features.dsa.repairs.spec_dispatch.validation import check_dsa_model
from mindspeed_dsa.megatron.dsa import FIXES, SPECS, dsa_repair
from mindspeed_dsa.patches.spec import Patch

FEATURE = dsa_repair(
    "dsa-spec-dispatch",
    summary="Makes --experimental-attention-variant dsa build a model.",
    switch_help="Let Megatron's spec functions build DSA layers.",
    validate=check_dsa_model,
    patches=(
        Patch(
            f"{SPECS}:get_experimental_attention_variant_module_spec",
            "wrap",
            f"{FIXES}.spec_dispatch.specs:dispatch_dsa",
            "the dispatcher rejects 'dsa', and the DSA spec lacks an attribute that the block builder reads",
            params=("config", "backend"),
            versions=">=0.16,<0.18",
        ),
        Patch(
            "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_layer_specs",
            "wrap",
            f"{FIXES}.spec_dispatch.specs:layer_specs_with_dsa",
            "MTP layers get a core attention that fails on the inputs of DSA",
            params=("config",),
            versions=">=0.16,<0.19",
        ),
    ),
)
