"""The all-to-alls of a MoE layer under the shared expert and the experts' weight gradients."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.moe.alltoall_overlap.validation import check_overlap
from mindspeed_dsa.megatron import configuration, ports, transfers
from mindspeed_dsa.patches.spec import Patch

_LAYER = "megatron.core.transformer.moe.moe_layer:MoELayer"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_IMPL = "mindspeed_dsa.features.moe.alltoall_overlap.layer"

FEATURE = Feature(
    name="moe-alltoall-overlap-comm",
    summary="Runs the shared expert, and in backward the experts' weight gradients, while tokens travel.",
    flags=(
        Flag(
            "--moe-alltoall-overlap-comm",
            "Hide dispatch and combine of MoE layers behind the shared expert and the experts' weight "
            "gradients of the same microbatch.",
        ),
    ),
    patches=(
        Patch(
            f"{_LAYER}.shared_experts_compute",
            "wrap",
            f"{_IMPL}:postpone_shared_experts",
            "the shared expert runs later, under the transfers",
            params=("hidden_states",),
            versions=">=0.15,<0.21",
        ),
        Patch(
            f"{_LAYER}.dispatch",
            "wrap",
            f"{_IMPL}:expect_transfers",
            "where a forward begins that has no step for the shared expert",
            params=("hidden_states", "probs"),
            versions=">=0.13,<0.15",
        ),
        Patch(
            f"{_DISPATCHER}.token_dispatch",
            "wrap",
            f"{_IMPL}:launch_dispatch",
            "its all-to-alls are started, not waited for",
        ),
        Patch(
            f"{_LAYER}.routed_experts_compute",
            "wrap",
            f"{_IMPL}:overlap_experts",
            "runs between the shared expert's two halves, with ports for its weights",
            params=("hidden_states", "probs"),
            versions=">=0.15,<0.21",
        ),
        Patch(
            f"{_LAYER}.experts_compute",
            "wrap",
            f"{_IMPL}:overlap_all_experts",
            "the same where one step computes shared and routed experts",
            params=("hidden_states", "probs", "residual"),
            versions=">=0.13,<0.15",
        ),
        Patch(
            f"{_DISPATCHER}.token_combine",
            "wrap",
            f"{_IMPL}:wait_for_combine",
            "the combine is on its way already",
            params=("hidden_states",),
        ),
        transfers.ROW,
        ports.ROW,
    ),
    requires=Requires(versions={"megatron-core": ">=0.13,<0.21"}),
    validate=configuration.validate(check_overlap),
    doc="moe-alltoall-overlap-comm.md",
)
FEATURES = (FEATURE,)
