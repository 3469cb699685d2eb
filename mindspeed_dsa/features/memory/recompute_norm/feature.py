"""Recomputing the outputs of norms, which only their consumer's backward reads."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.memory.recompute_norm.options import Options
from mindspeed_dsa.features.memory.recompute_norm.validation import check_norm
from mindspeed_dsa.features.memory.switches import wanted
from mindspeed_dsa.megatron import configuration, layers, releases
from mindspeed_dsa.patches.spec import Patch

_IMPL = "mindspeed_dsa.features.memory.recompute_norm.layer"

FEATURE = Feature(
    name="recompute-norm",
    summary="Frees the outputs of a layer's two norms after their consumers have used them, and computes "
    "them again right before the consumers' backward reads them.",
    flags=(
        Flag("--recompute-norm", "Recompute the input norm and the norm before the MLP in backward."),
        Flag(
            "--recompute-norm-num-layers",
            "Recompute them in N layers of each pipeline stage; default: in all layers.",
            kind="value",
            type=int,
            metavar="N",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.forward",
            "wrap",
            f"{_IMPL}:recompute_norms",
            "Megatron's own layernorm recompute does it, in the chosen layers",
            versions=releases.SERVED,
        ),
        *layers.rows(_IMPL, releases.SERVED),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    active=wanted("recompute_norm", "recompute_norm_num_layers"),
    options=Options.of,
    validate=configuration.validate(check_norm, Options.of),
    doc="recompute-norm.md",
)
FEATURES = (FEATURE,)
