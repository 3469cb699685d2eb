"""DeepSeek's order of the indexer's dimensions: rotary half first, halves rotated, not pairs."""

from __future__ import annotations

from mindspeed_dsa.feature import Flag
from mindspeed_dsa.megatron.dsa import DSA, dsa_option
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs.rope_first"

FEATURE = dsa_option(
    "dsa-rope-first",
    summary="Indexer heads in DeepSeek's layout, for checkpoints from DeepSeek or Hugging Face.",
    switch=Flag(
        "--dsa-indexer-rope-first",
        "Apply the indexer's rotary embedding to the first dimensions of each head and without "
        "interleaving, as DeepSeek does. Default: Megatron's order.",
    ),
    versions=">=0.12.1,<0.19",
    patches=(
        Patch(
            f"{DSA}:DSAIndexer._apply_rope",
            "replace",
            f"{_HERE}.rotation:rotate_first",
            "Megatron rotates the last dimensions, in interleaved pairs",
            params=("x", "rotary_pos_emb", "mscale"),
            versions=">=0.16,<0.19",  # older releases get our indexer, which has the option
            factory=True,
        ),
    ),
)
