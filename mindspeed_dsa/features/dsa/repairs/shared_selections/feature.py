"""Recomputed layers that share a selection of keys."""

from __future__ import annotations

from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature
from mindspeed_dsa.features.dsa.repairs.shared_selections.validation import check_recompute, uses_dsa
from mindspeed_dsa.megatron.configuration import validate
from mindspeed_dsa.megatron.dsa import FIXES
from mindspeed_dsa.patches.spec import Patch

FEATURE = Feature(
    name="dsa-shared-selections",
    summary="Refuses recomputation of layers that share a selection of keys, whose gradients would be wrong.",
    flags=(EXPERIMENTAL_ATTENTION_VARIANT,),
    patches=(
        Patch(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            "wrap",
            f"{FIXES}.shared_selections.validation:refuse_recompute",
            "a recomputed layer reads a selection that is not its microbatch's, and nothing says so",
            versions=">=0.19,<0.21",
        ),
    ),
    active=uses_dsa,
    validate=validate(check_recompute),
    doc="dsa-shared-selections.md",
)
