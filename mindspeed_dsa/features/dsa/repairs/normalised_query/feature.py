"""The indexer reads the normalised latent query, as DeepSeek's does."""

from __future__ import annotations

from mindspeed_dsa.feature import Flag
from mindspeed_dsa.megatron.dsa import MLA, dsa_option
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs.normalised_query"

FEATURE = dsa_option(
    "dsa-normalised-query",
    summary="The indexer's queries come from the latent query after its norm, for DeepSeek checkpoints.",
    switch=Flag(
        "--dsa-indexer-normalised-query",
        "Pass the indexer the latent query after its norm, as DeepSeek does. Default: before it, as "
        "Megatron does.",
    ),
    versions=">=0.12.1,<0.19",
    patches=(
        Patch(
            f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_HERE}.latent_query:normalise_latent_query",
            "the norm is fused into the up projection, after the point where the indexer branches off",
            versions=">=0.16,<0.19",  # older releases get our indexer, which has the option
        ),
    ),
)
