"""All-to-alls behind another microbatch's computation."""

from __future__ import annotations

from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.features.pipeline.fb_overlap.options import Options
from mindspeed_dsa.features.pipeline.fb_overlap.validation import check_overlap
from mindspeed_dsa.megatron import configuration, ports, transfers
from mindspeed_dsa.patches.spec import Patch

_PLAN = "megatron.core.models.common.model_chunk_schedule_plan:TransformerLayerSchedulePlan"
_HERE = "mindspeed_dsa.features.pipeline.fb_overlap"
_RANGE = ">=0.14,<0.21"
_WHOLE_LAYERS = "it works in the layer's forward, which this takes apart; omit one of them"

FEATURE = Feature(
    name="moe-fb-overlap",
    summary="Runs one microbatch's forward and another's backward side by side, so that each hides the "
    "other's all-to-alls.",
    flags=(
        Flag(
            "--moe-fb-overlap",
            "Hide dispatch and combine of MoE layers behind the computation of another microbatch that runs "
            "in the other direction.",
        ),
    ),
    patches=(
        Patch(
            "megatron.training.arguments:validate_args",
            "wrap",
            f"{_HERE}.configure:switch_on_paired_schedule",
            "Megatron's schedule of pairs is what this fills",
            params=("args",),
            required=False,
            priority=-1,
        ),
        Patch(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            "wrap",
            f"{_HERE}.configure:configure_paired_schedule",
            "the same for jobs without Megatron's parser; fp32 works, which it asserts against",
        ),
        Patch(
            f"{_PLAN}._build_callable_nodes",
            "wrap",
            f"{_HERE}.layer:cut_at_transfers",
            "the layer's pieces start and end with halves of transfers",
            params=("event", "comp_stream", "comm_stream", "extra_args"),
        ),
        Patch(
            f"{_PLAN}.run",
            "wrap",
            f"{_HERE}.layer:run_pair",
            "the order in which each direction computes under the other's transfers",
            params=("f_layer", "b_layer", "f_input", "b_grad", "is_last_layer_in_bwd"),
        ),
        Patch(
            f"{_PLAN}.release_state",
            "wrap",
            f"{_HERE}.layer:release_pieces",
            "a layer's graph ends with its backward",
            versions=">=0.16,<0.21",
        ),
        Patch(
            "megatron.core.transformer.moe.moe_layer:MoELayer.shared_experts_compute",
            "wrap",
            f"{_HERE}.layer:postpone_shared_expert",
            "the shared expert is a piece of its own, under the transfers",
            params=("hidden_states",),
            versions=">=0.16,<0.21",
        ),
        Patch(
            "megatron.core.pipeline_parallel.utils:ScheduleNode.default_backward_func",
            "wrap",
            f"{_HERE}.frozen:run_what_learns",
            "it refuses pieces in which nothing learns, as a frozen embedding",
            params=("outputs", "output_grad"),
        ),
        transfers.ROW,
        ports.ROW,
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    conflicts=(
        Conflict(
            "moe-alltoall-overlap-comm",
            "both hide the same transfers, this one behind another microbatch; omit one of them",
        ),
        Conflict(
            "balanced-moe-experts",
            "the weights that it moves need one backward for the whole layer, which this takes apart; omit "
            "one of them",
        ),
        Conflict("recompute-ahead", _WHOLE_LAYERS),
        Conflict("dsa-stage", _WHOLE_LAYERS),
    ),
    options=Options.of,
    validate=configuration.validate(check_overlap, Options.of),
    doc="moe-fb-overlap.md",
)
FEATURES = (FEATURE,)
