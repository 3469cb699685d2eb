"""``--use-fused-rotary-pos-emb``: the function below every way in which Megatron rotates queries and keys."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.operators.rotary.arguments import take_the_place_of_megatrons
from mindspeed_dsa.features.operators.rotary.validation import check_rotary
from mindspeed_dsa.features.operators.selection import FUSED_OPERATORS, selects
from mindspeed_dsa.megatron import configuration, releases
from mindspeed_dsa.patches.spec import Patch

FEATURE = Feature(
    name="fused-rotary-pos-emb",
    summary="Rotary position embedding is one operator forward and one backward, whose sines and cosines are "
    "computed once for all layers.",
    flags=(Flag("--use-fused-rotary-pos-emb", "Fuse rotary position embedding."), FUSED_OPERATORS),
    patches=(
        Patch(
            "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd",
            "wrap",
            "mindspeed_dsa.features.operators.rotary.embedding:rotate_fused",
            "every call computes sines and cosines anew and rotates in some fifteen operations",
            params=("t", "freqs", "rotary_interleaved", "mscale"),
            versions=releases.SERVED,
        ),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    active=selects("rotary-pos-emb", "use_fused_rotary_pos_emb"),
    rewrite=take_the_place_of_megatrons,
    validate=configuration.validate(check_rotary),
    doc="fused-operators.md",
)
FEATURES = (FEATURE,)
