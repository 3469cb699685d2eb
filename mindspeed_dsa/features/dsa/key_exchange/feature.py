"""DSA under context parallelism."""

from __future__ import annotations

from mindspeed_dsa.context_parallel.algorithms import MEGATRON_FLAGS
from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature, Flag
from mindspeed_dsa.features.dsa.key_exchange.arguments import gather_keys
from mindspeed_dsa.features.dsa.key_exchange.options import Options, wanted
from mindspeed_dsa.features.dsa.key_exchange.validation import check_dsa_context_parallel
from mindspeed_dsa.megatron.configuration import validate
from mindspeed_dsa.megatron.dsa import DSA, MLA
from mindspeed_dsa.patches.spec import Patch

_IMPL = "mindspeed_dsa.features.dsa.key_exchange"
_RELEASES = ">=0.16,<0.19"

KEEP_GATHERED = Flag(
    "--cp-keep-gathered",
    "Keep the keys that were gathered from context parallel ranks until backward, instead of gathering them "
    "again there.",
)

FEATURE = Feature(
    name="dsa-context-parallel",
    summary="DSA under context parallelism: queries stay, small keys are gathered behind the projections.",
    flags=(KEEP_GATHERED, *MEGATRON_FLAGS, EXPERIMENTAL_ATTENTION_VARIANT),
    active=wanted,
    options=Options.of,
    rewrite=gather_keys,
    validate=validate(check_dsa_context_parallel, Options.of),
    doc="dsa-context-parallel.md",
    patches=(
        Patch(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            "wrap",
            f"{_IMPL}.configuration:accept_context_parallel_dsa",
            "the configuration asserts one context parallel rank for DSA",
            versions=_RELEASES,
        ),
        Patch(
            f"{DSA}:DSAIndexer.__init__",
            "wrap",
            f"{_IMPL}.configuration:mark_gradients_of_own_rows",
            "what projects a rank's own rows has a part of the gradient, to be summed",
            versions=_RELEASES,
            priority=100,  # after the mark that asks for an average
        ),
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_IMPL}.core_attention:wait_before_recompute",
            "a gather under way cannot be recomputed",
            params=("query", "key", "value", "attention_mask"),
            versions=_RELEASES,
            priority=200,  # outside of the recomputation
        ),
        Patch(
            f"{MLA}:MultiLatentAttention.forward",
            "wrap",
            f"{_IMPL}.core_attention:gather_again_early",
            "the keys that backward reads are gathered behind the output projection's backward",
            versions=">=0.12.1,<0.19",
        ),
    ),
)
