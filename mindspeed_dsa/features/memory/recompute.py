"""Recomputing outputs that only their consumer's backward reads: activation functions and norms."""

from __future__ import annotations

from typing import Any

from mindspeed_dsa.declarations import Feature, Flag, Requires
from mindspeed_dsa.features.memory import recompute_limits
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.memory"
_BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock.__init__"
_MTP_BLOCK = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock.__init__"
_EXPERTS = "megatron.core.transformer.moe.experts"
_CHOICE = "which layers of this pipeline stage take part is known when its layers are there"
_MTP_CHOICE = "layers of multi-token prediction are built outside of the decoder"
_RANGE = ">=0.16,<0.17"
_SWITCHES = ("recompute_activation_function", "recompute_norm", "recompute_verify")


def wanted(dest: str, *options: str) -> Any:
    """On with its switch; an option without the switch is a mistake that `validate` tells.

    Args:
        dest: of the switch.
        options: of it, beside a number of layers.
    """
    others = (f"{dest}_num_layers", *options)

    def active(settings: Any) -> bool:
        return bool(getattr(settings, dest, False)) or any(
            getattr(settings, other, None) is not None for other in others
        )

    return active


ACTIVATION = Feature(
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
            f"{_HERE}.recompute_activation:recompute_in_mlp",
            "the activation lies between fc1 and fc2, which this calls",
            params=("hidden_states", "per_token_scale"),
            versions=_RANGE,
        ),
        Patch(
            f"{_EXPERTS}:GroupedMLP.forward",
            "wrap",
            f"{_HERE}.recompute_activation:recompute_in_grouped_mlp",
            "Megatron's own moe_act recompute does it, in the chosen layers",
            versions=_RANGE,
        ),
        Patch(
            f"{_EXPERTS}:TEGroupedMLP.forward",
            "wrap",
            f"{_HERE}.recompute_activation:recompute_in_grouped_mlp",
            "Megatron's own moe_act recompute does it, in the chosen layers",
            versions=_RANGE,
        ),
        Patch(_BLOCK, "wrap", f"{_HERE}.recompute_activation:choose_in_block", _CHOICE, ("config",), _RANGE),
        Patch(
            _MTP_BLOCK, "wrap", f"{_HERE}.recompute_activation:choose_in_mtp", _MTP_CHOICE, versions=_RANGE
        ),
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    active=wanted("recompute_activation_function"),
    validate=recompute_limits.of_activation,
    doc="recompute-activation-function.md",
)
NORM = Feature(
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
            f"{_HERE}.recompute_norm:recompute_in_layer",
            "Megatron's own layernorm recompute does it, in the chosen layers",
            versions=_RANGE,
        ),
        Patch(_BLOCK, "wrap", f"{_HERE}.recompute_norm:choose_in_block", _CHOICE, ("config",), _RANGE),
        Patch(_MTP_BLOCK, "wrap", f"{_HERE}.recompute_norm:choose_in_mtp", _MTP_CHOICE, versions=_RANGE),
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    active=wanted("recompute_norm"),
    validate=recompute_limits.of_norm,
    doc="recompute-norm.md",
)
OUTPUTS = Feature(
    name="recompute-outputs",
    summary="The checkpoint without output that both of these, and Megatron's own modules, recompute with: "
    "works without Transformer Engine, restores random states only where they are drawn from, verifies.",
    flags=(
        Flag(
            "--recompute-verify",
            "Keep a host copy of every output that is recomputed, and fail where the recomputed bytes "
            "differ. For debugging.",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.tensor_parallel:CheckpointWithoutOutput",
            "value",
            f"{_HERE}.recompute_outputs:CheckpointWithoutOutput",
            "Megatron's needs Transformer Engine even without fp8, and copies random states every time",
            versions=_RANGE,
        ),
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    active=lambda settings: any(wanted(dest)(settings) for dest in _SWITCHES),
    validate=recompute_limits.of_outputs,
    doc="recompute-outputs.md",
)
FEATURES = (ACTIVATION, NORM, OUTPUTS)
