"""Recomputing the outputs of activation functions, which only fc2's backward reads."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.memory.recompute_activation_function.options import Options
from mindspeed_dsa.features.memory.recompute_activation_function.validation import check_activation
from mindspeed_dsa.features.memory.switches import wanted
from mindspeed_dsa.megatron import configuration, layers, releases
from mindspeed_dsa.patches.spec import Patch

_IMPL = "mindspeed_dsa.features.memory.recompute_activation_function.mlp"
_EXPERTS = "megatron.core.transformer.moe.experts"

FEATURE = Feature(
    name="recompute-activation-function",
    summary="Frees the output of each MLP's activation function after fc2 has used it, and computes it again "
    "right before fc2's backward reads it.",
    flags=(
        Flag(
            "--recompute-activation-function",
            "Recompute the activation function of MLPs, experts and shared experts in backward.",
        ),
        Flag(
            "--recompute-activation-function-num-layers",
            "Recompute it in N layers of each pipeline stage; default: in all layers.",
            kind="value",
            type=int,
            metavar="N",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.mlp:MLP.forward",
            "wrap",
            f"{_IMPL}:recompute_in_mlp",
            "the activation lies between fc1 and fc2, which this calls",
            params=("hidden_states", "per_token_scale"),
            versions=releases.SERVED,
        ),
        *(
            Patch(
                f"{_EXPERTS}:{experts}.forward",
                "wrap",
                f"{_IMPL}:recompute_in_grouped_mlp",
                "Megatron's own moe_act recompute does it, in the chosen layers",
                versions=versions,
            )
            for experts, versions in (("GroupedMLP", ">=0.12.1,<0.17"), ("TEGroupedMLP", releases.SERVED))
        ),
        *layers.rows(_IMPL, releases.SERVED),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    active=wanted("recompute_activation_function", "recompute_activation_function_num_layers"),
    options=Options.of,
    validate=configuration.validate(check_activation, Options.of),
    doc="recompute-activation-function.md",
)
FEATURES = (FEATURE,)
