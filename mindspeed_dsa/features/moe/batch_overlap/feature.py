"""Two halves of one microbatch in a MoE layer, one of which computes while the other communicates."""

from __future__ import annotations

from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.features.moe.batch_overlap.options import Options, wanted
from mindspeed_dsa.features.moe.batch_overlap.validation import check_arguments
from mindspeed_dsa.megatron import configuration, ports, transfers
from mindspeed_dsa.patches.spec import Patch

_LAYER = "megatron.core.transformer.moe.moe_layer:MoELayer"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_IMPL = "mindspeed_dsa.features.moe.batch_overlap.layer"
_RANGE = ">=0.14,<0.21"
_OUTERMOST = 10
"""What else is done to the steps of a whole microbatch is done only where it stays whole."""

FEATURE = Feature(
    name="moe-batch-overlap",
    summary="Runs the tokens of a MoE layer in two halves, one of which computes while the other travels.",
    flags=(
        Flag(
            "--moe-batch-overlap",
            "Hide dispatch and combine of MoE layers behind the other half of the same microbatch's tokens, "
            "where that was measured to be faster.",
        ),
        Flag("--moe-batch-overlap-always", "Cut the tokens without measuring."),
    ),
    patches=(
        Patch(
            f"{_LAYER}.forward",
            "wrap",
            f"{_IMPL}:choose_way",
            "in its first step a layer is measured whole and in halves",
            params=("hidden_states",),
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_LAYER}.shared_experts_compute",
            "wrap",
            f"{_IMPL}:postpone_shared_expert",
            "the shared expert runs later, under transfers that no half hides",
            params=("hidden_states",),
            versions=">=0.15,<0.21",
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.dispatch_preprocess",
            "wrap",
            f"{_IMPL}:take_tokens",
            "tokens are cut in halves once they are routed",
            params=("hidden_states", "routing_map", "probs"),
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.token_dispatch",
            "wrap",
            f"{_IMPL}:skip_dispatch",
            "each half has a dispatch of its own",
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_LAYER}.routed_experts_compute",
            "wrap",
            f"{_IMPL}:run_halves",
            "runs for each half, between its transfers",
            params=("hidden_states", "probs"),
            versions=">=0.15,<0.21",
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_LAYER}.experts_compute",
            "wrap",
            f"{_IMPL}:run_halves_and_shared_expert",
            "the same where one step computes shared and routed experts",
            params=("hidden_states", "probs", "residual"),
            versions=">=0.14,<0.15",
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.token_combine",
            "wrap",
            f"{_IMPL}:skip_combine",
            "each half has been combined",
            params=("hidden_states",),
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.combine_postprocess",
            "wrap",
            f"{_IMPL}:give_back_tokens",
            "the halves are one again",
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        transfers.ROW,
        ports.ROW,
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    conflicts=(
        Conflict(
            "moe-fb-overlap",
            "both hide the same transfers, that one behind another microbatch; omit one of them",
        ),
        Conflict(
            "balanced-moe-experts",
            "its plan is for the tokens of a whole microbatch, which are cut before; omit one of them",
        ),
    ),
    active=wanted,
    options=Options.of,
    validate=configuration.validate(check_arguments, Options.of),
    doc="moe-batch-overlap.md",
)
FEATURES = (FEATURE,)
