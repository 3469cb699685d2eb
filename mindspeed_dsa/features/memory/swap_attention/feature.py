"""Saved tensors of attention on the host between forward and backward."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.memory.swap_attention.options import (
    DEFAULT_MIN_BYTES,
    DEFAULT_MODULES,
    MODULES,
    Options,
)
from mindspeed_dsa.features.memory.swap_attention.validation import check_swapped_attention
from mindspeed_dsa.features.memory.switches import wanted, without
from mindspeed_dsa.megatron import configuration, layers, releases
from mindspeed_dsa.patches.spec import Patch

_IMPL = "mindspeed_dsa.features.memory.swap_attention.layers"
_PARALLEL = "megatron.core.tensor_parallel"
_wanted = wanted("swap_attention", "swap_modules", "swap_attention_num_layers", "swap_attention_min_bytes")

FEATURE = Feature(
    name="swap-attention",
    summary="Moves what attention saves for backward to host memory, and fetches it before its backward; "
    "both copies run behind the MLPs.",
    flags=(
        Flag("--swap-attention", "Keep saved tensors of attention in host memory until their backward."),
        Flag(
            "--swap-modules",
            f"Whose saved tensors: names out of {', '.join(MODULES)}, with commas between them; "
            f"default: {DEFAULT_MODULES}.",
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
            f"{DEFAULT_MIN_BYTES >> 20} MiB.",
            kind="value",
            type=int,
            metavar="BYTES",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.forward",
            "wrap",
            f"{_IMPL}:swap_in_layer",
            "device memory goes at the end of a layer, and comes back when backward reaches the layer above",
            versions=releases.SERVED,
        ),
        *layers.rows(_IMPL, releases.SERVED),
        Patch(
            f"{_PARALLEL}.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
            "wrap",
            "mindspeed_dsa.parallel.own_weights:with_own_weight",
            "gradient accumulation fusion reads and sets attributes of the parameter",
            ("ctx", "grad_output"),
            releases.SERVED,
        ),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    active=_wanted,
    options=Options.of,
    validate=configuration.validate(check_swapped_attention, Options.of),
    doc="swap-attention.md",
)

OUTPUTS = Feature(
    name="swap-attention-outputs",
    summary="Keeps swap-attention from moving what Megatron's own modules recompute in place.",
    flags=(),
    patches=(
        Patch(
            f"{_PARALLEL}.random:CheckpointWithoutOutput.checkpoint",
            "wrap",
            "mindspeed_dsa.parallel.discarded:mark_outputs",
            "outputs that are recomputed in place must not be moved",
            ("run_function",),
            releases.SERVED,
        ),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    active=without(_wanted, "recompute-outputs"),
    doc="swap-attention.md",
)
FEATURES = (FEATURE, OUTPUTS)
