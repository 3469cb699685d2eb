"""Saved tensors of attention on the host between forward and backward."""

from __future__ import annotations

from typing import Any

from mindspeed_dsa.declarations import Feature, Flag, Requires
from mindspeed_dsa.features.memory import swap_attention_limits as limits
from mindspeed_dsa.features.memory.recompute import wanted
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.memory"
_RANGE = ">=0.16,<0.17"
_TRANSFORMER = "megatron.core.transformer"
_PARALLEL = "megatron.core.tensor_parallel"

FEATURE = Feature(
    name="swap-attention",
    summary="Moves what attention saves for backward to host memory, and fetches it before its backward; "
    "both copies run behind the MLPs.",
    flags=(
        Flag("--swap-attention", "Keep saved tensors of attention in host memory until their backward."),
        Flag(
            "--swap-modules",
            f"Whose saved tensors: names out of {', '.join(limits.MODULES)}, with commas between them; "
            f"default: {limits.DEFAULT_MODULES}.",
            kind="value",
            metavar="NAMES",
        ),
        Flag(
            "--swap-attention-num-layers",
            "Swap in N layers of each pipeline stage; default: in all layers.",
            kind="value",
            type=int,
            metavar="N",
        ),
        Flag(
            "--swap-attention-min-bytes",
            "Leave storages on the device that are smaller than this; default: "
            f"{limits.DEFAULT_MIN_BYTES >> 20} MiB.",
            kind="value",
            type=int,
            metavar="BYTES",
        ),
    ),
    patches=(
        Patch(
            f"{_TRANSFORMER}.transformer_layer:TransformerLayer.forward",
            "wrap",
            f"{_HERE}.swap_attention_layers:swap_in_layer",
            "device memory goes at the end of a layer, and comes back when backward reaches the layer above",
            versions=_RANGE,
        ),
        Patch(
            f"{_TRANSFORMER}.transformer_block:TransformerBlock.__init__",
            "wrap",
            f"{_HERE}.swap_attention_layers:choose_in_block",
            "which layers of this pipeline stage take part is known when its layers are there",
            ("config",),
            _RANGE,
        ),
        Patch(
            f"{_TRANSFORMER}.multi_token_prediction:MultiTokenPredictionBlock.__init__",
            "wrap",
            f"{_HERE}.swap_attention_layers:choose_in_mtp",
            "layers of multi-token prediction are built outside of the decoder",
            versions=_RANGE,
        ),
        Patch(
            f"{_PARALLEL}.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
            "wrap",
            "mindspeed_dsa.parallel.own_weights:with_own_weight",
            "gradient accumulation fusion reads and sets attributes of the parameter",
            ("ctx", "grad_output"),
            _RANGE,
        ),
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    active=wanted(*limits.SWITCHES),
    validate=limits.problems,
    doc="swap-attention.md",
)


def _with_megatrons_checkpoints(settings: Any) -> bool:
    """recompute-outputs, which is decided earlier, puts a class in place that does it itself."""
    return wanted(*limits.SWITCHES)(settings) and "recompute-outputs" not in settings.features_on


OUTPUTS = Feature(
    name="swap-attention-outputs",
    summary="Tells swap-attention what Megatron's own modules recompute in place.",
    flags=(),
    patches=(
        Patch(
            f"{_PARALLEL}.random:CheckpointWithoutOutput.checkpoint",
            "wrap",
            f"{_HERE}.discarded:mark_outputs",
            "outputs that are recomputed in place must not be moved",
            ("run_function",),
            _RANGE,
        ),
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    active=_with_megatrons_checkpoints,
    doc="swap-attention.md",
)
FEATURES = (FEATURE, OUTPUTS)
