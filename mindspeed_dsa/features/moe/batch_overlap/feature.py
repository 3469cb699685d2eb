"""Two halves of one microbatch in a MoE layer, one of which computes while the other communicates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.expert_parallel import (
    ROWS,
    check_all_to_all,
    check_experts,
    check_refused,
    expert_tensor_ranks,
    number_of_experts,
)
from mindspeed_dsa.megatron.measured import check_measured
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options:
    """The requested settings.

    Attributes:
        switched_on: whether the switch itself is on.
        always: layers are cut without being measured.
    """

    switched_on: bool
    always: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings, or from arguments."""
        return cls(
            switched_on=bool(getattr(settings, "moe_batch_overlap", False)),
            always=bool(getattr(settings, "moe_batch_overlap_always", False)),
        )


def wanted(settings: Any) -> bool:
    """Activation rule: on with the switch, or with its option alone, which validation then refuses."""
    return Options.of(settings) != Options(False, False)


_FLAG = "--moe-batch-overlap"
_ALWAYS = "--moe-batch-overlap-always"
_REFUSED = {
    "moe_pad_expert_input_to_capacity": (
        "gives each expert a fixed number of rows of the whole microbatch; without it, capacity works"
    ),
    "moe_shared_expert_overlap": "puts the shared expert under the transfers of the whole microbatch",
    "overlap_moe_expert_parallel_comm": "hides the same transfers behind another microbatch",
    "delay_wgrad_compute": "computes the weight gradients that lie under the transfers at another place",
    "overlap_dispatch_backward_with_experts_wgrad": "puts the same weight gradients under one transfer",
    "fp8": "scales the rows of an expert together, which halves would change",
    "fp4": "scales the rows of an expert together, which halves would change",
    "enable_cuda_graph": "would hold each transfer at a fixed place",
    "external_cuda_graph": "would hold each transfer at a fixed place",
    "cuda_graph_impl": "would hold each transfer at a fixed place",
}
"""Arguments of Megatron that are refused when they are set, and why."""


def check_halves(args: Any, options: Options) -> Iterator[str]:
    """Refuse arguments, or a model's configuration, that rule out halves or leave nothing to hide."""
    if not options.switched_on:
        yield f"{_ALWAYS} has no effect without {_FLAG}; add that or omit it"
        return
    if not number_of_experts(args):
        yield from check_experts(args, _FLAG)
        return
    yield from check_all_to_all(args, _FLAG)
    if (ranks := expert_tensor_ranks(args)) > 1:
        yield (
            f"{_FLAG} does not hide the gather and reduce-scatter of experts that are split over {ranks} "
            "ranks; add --expert-tensor-parallel-size 1"
        )
    yield from check_refused(args, _FLAG, _REFUSED)
    if not options.always and argument(args, "moe_enable_routing_replay"):
        yield (
            f"{_FLAG} measures with forwards that --moe-enable-routing-replay would count as the step's; add "
            f"{_ALWAYS}"
        )


def check_arguments(args: Any, options: Options) -> Iterator[str]:
    """Report what in a job's arguments does not combine with the feature."""
    yield from check_halves(args, options)
    yield from check_choice(args, options)


def check_choice(args: Any, options: Options) -> Iterator[str]:
    """Refuse to measure whether halves pay, under deterministic training."""
    if options.switched_on and not options.always:
        yield from check_measured(args, _FLAG, "whether halves pay", f"add {_ALWAYS}")


_LAYER = "megatron.core.transformer.moe.moe_layer:MoELayer"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_IMPL = "mindspeed_dsa.features.moe.batch_overlap.layer"
_RANGE = ">=0.14,<0.21"
_OUTERMOST = 10
"""Other features' work on the steps of a whole microbatch is done only where it stays whole."""

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
            f"{_IMPL}:choose_mode",
            "measures a layer whole and in halves, in its first step",
            params=("hidden_states",),
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_LAYER}.shared_experts_compute",
            "wrap",
            f"{_IMPL}:postpone_shared_expert",
            "postpones the shared expert until transfers are under way that no half hides",
            params=("hidden_states",),
            versions=">=0.15,<0.21",
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.dispatch_preprocess",
            "wrap",
            f"{_IMPL}:take_tokens",
            "cuts the routed tokens in half-batches",
            params=("hidden_states", "routing_map", "probs"),
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.token_dispatch",
            "wrap",
            f"{_IMPL}:skip_dispatch",
            "skips the dispatch of the whole batch: each half-batch has its own",
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_LAYER}.routed_experts_compute",
            "wrap",
            f"{_IMPL}:run_halves",
            "runs the routed experts for each half-batch, between its transfers",
            params=("hidden_states", "probs"),
            versions=">=0.15,<0.21",
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_LAYER}.experts_compute",
            "wrap",
            f"{_IMPL}:run_halves_and_shared_expert",
            "runs the routed experts for each half-batch, where one step computes the shared expert too",
            params=("hidden_states", "probs", "residual"),
            versions=">=0.14,<0.15",
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.token_combine",
            "wrap",
            f"{_IMPL}:skip_combine",
            "skips the combine of the whole batch: each half-batch has its own",
            params=("hidden_states",),
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.combine_postprocess",
            "wrap",
            f"{_IMPL}:give_back_tokens",
            "concatenates the outputs of both half-batches",
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        *ROWS,
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    conflicts=(
        Conflict(
            "moe-fb-overlap",
            "both hide the same transfers, --moe-fb-overlap behind another microbatch; omit one of them",
        ),
        Conflict(
            "balanced-moe-experts",
            "balanced-moe-experts plans for a whole microbatch, whose tokens are split; omit one of them",
        ),
    ),
    active=wanted,
    options=Options.of,
    check=check_arguments,
    doc="moe-batch-overlap.md",
)
