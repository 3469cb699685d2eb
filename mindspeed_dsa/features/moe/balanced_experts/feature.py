"""Hot experts' weights travel to the tokens, where tokens would overload the experts' ranks."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.moe.balanced_experts.options import Options, wanted
from mindspeed_dsa.features.moe.balanced_experts.validation import check_arguments
from mindspeed_dsa.megatron import configuration
from mindspeed_dsa.patches.spec import Patch

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_IMPL = "mindspeed_dsa.features.moe.balanced_experts.layer"
_RANGE = ">=0.14,<0.21"
_OUTERMOST = 10
"""Tokens are kept out before, and weights travel after, whatever other features do with the transfers."""

FEATURE = Feature(
    name="balanced-moe-experts",
    summary="Sends the weights of overloaded experts to the ranks that have tokens for them, in place of "
    "the tokens.",
    flags=(
        Flag(
            "--balanced-moe-experts",
            "Move experts' weights to the tokens where the most loaded rank is done earlier that way.",
        ),
        Flag(
            "--balanced-moe-hot-expert-num",
            "Most experts of a layer to move in one microbatch; default: 3.",
            kind="value",
            type=int,
            metavar="N",
        ),
        Flag(
            "--balanced-moe-matmul-rate",
            "TFLOP/s of an expert's matmuls on one rank; default: measured once.",
            kind="value",
            type=float,
            metavar="TFLOPS",
        ),
        Flag(
            "--balanced-moe-link-rate",
            "GB/s of one rank's link to the others, in one direction; default: measured once.",
            kind="value",
            type=float,
            metavar="GBS",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.moe.moe_layer:MoELayer.__init__",
            "wrap",
            f"{_IMPL}:know_experts",
            "the dispatcher's steps need the experts, and unsupported layers are refused",
            versions=_RANGE,
        ),
        Patch(
            f"{_DISPATCHER}.dispatch_preprocess",
            "wrap",
            f"{_IMPL}:keep_hot_tokens",
            "the plan is made, and tokens of moved experts stay here",
            params=("hidden_states", "routing_map", "probs"),
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.preprocess",
            "wrap",
            f"{_IMPL}:count_cold_tokens",
            "the number of rows to dispatch is no longer a fixed one",
            params=("routing_map",),
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.dispatch_postprocess",
            "wrap",
            f"{_IMPL}:send_weights",
            "weights travel while the cold experts compute",
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.combine_preprocess",
            "wrap",
            f"{_IMPL}:run_hot_experts",
            "moved experts compute here",
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.combine_postprocess",
            "wrap",
            f"{_IMPL}:add_hot_outputs",
            "their outputs are added to those that come back",
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    active=wanted,
    options=Options.of,
    validate=configuration.validate(check_arguments, Options.of),
    doc="balanced-moe-experts.md",
)
FEATURES = (FEATURE,)
