"""Feature that hides MoE all-to-alls behind the computation of another microbatch (1F1B overlap)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from packaging.version import Version

from mindspeed_dsa.feature import Conflict, Context, Feature, Flag, Requires
from mindspeed_dsa.megatron import batches
from mindspeed_dsa.megatron.configuration import argument, require
from mindspeed_dsa.megatron.expert_parallel import (
    ROWS,
    check_all_to_all,
    check_experts,
    check_refused,
    layers_with_experts,
    number_of_experts,
    run_shared_expert,
)
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.megatron.low_precision import check_history
from mindspeed_dsa.megatron.pipeline_chunks import is_v_shaped
from mindspeed_dsa.megatron.two_streams import ONE_STREAM, Streams
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options:
    """Options of ``--moe-fb-overlap``, including capabilities of the Megatron release.

    Attributes:
        counts_uses: whether overlapped gradient reduction supports parameters that get two gradients per
            microbatch.
        streams: configuration of the second stream for permutations.
        moves_experts: whether the weights of overloaded experts are sent to other ranks.
    """

    counts_uses: bool
    streams: Streams = ONE_STREAM
    moves_experts: bool = False

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings, or from arguments."""
        release = versions.of_job(settings)
        return cls(
            counts_uses=release is None or Version(release) >= Version("0.16.0"),
            streams=Streams.of(settings),
            moves_experts=bool(getattr(settings, "balanced_moe_experts", False)),
        )


FLAG = "--moe-fb-overlap"
_DOCUMENTS = "describes documents that Megatron-LM's script does not pass to pairs of microbatches"
_REFUSED = {
    "mtp_detach_heads": "detaches hidden states in a forward that Megatron's schedule of pairs never calls",
    "moe_shared_expert_overlap": "runs the shared expert inside of the dispatcher, which is taken apart",
    "delay_wgrad_compute": "computes weight gradients at other places than this does",
    "ep_overlap_early_attn_memory_release": "changes the order that hides the combine",
    "overlap_dispatch_backward_with_experts_wgrad": "hides the same transfer",
    "fine_grained_activation_offloading": "moves activations by pieces that are cut elsewhere",
    "moe_paged_stash": "moves activations by pieces that are cut elsewhere",
    "cpu_offloading": "moves activations by whole layers",
    "dataloader_inter_document_masking": _DOCUMENTS,
    "use_megatron_fsdp": "gathers weights by whole layers",
    "is_hybrid_model": "has a model of its own, which Megatron cannot take apart",
    "hybrid_override_pattern": "has a model of its own, which Megatron cannot take apart",
    "hybrid_layer_pattern": "has a model of its own, which Megatron cannot take apart",
}
"""Megatron arguments that are refused when set, with the reason."""


def check_overlap(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem for each argument or configuration field that prevents pairs or overlap."""
    if not number_of_experts(args):
        yield from check_experts(args, FLAG)
        return
    yield from _check_parallelism(args, options)
    yield from _check_microbatches(args)
    yield from _check_recompute(args)
    yield from check_refused(args, FLAG, _REFUSED)
    if batches.delivers_conversations(args):
        yield from check_refused(args, FLAG, {"sft": _DOCUMENTS})
    yield from refuse_graphs(args, FLAG, "a graph holds each transfer at a fixed place")


def _check_parallelism(args: Any, options: Options) -> Iterator[str]:
    yield from check_all_to_all(args, FLAG)
    stages = argument(args, "pipeline_model_parallel_size") or 1
    if stages > 1 and argument(args, "virtual_pipeline_model_parallel_size") is None:
        yield (
            f"{FLAG} with a pipeline needs the interleaved schedule, in which a forward and a backward are "
            "ready at the same time; add --num-virtual-stages-per-pipeline-rank or "
            "--num-layers-per-virtual-pipeline-stage"
        )
    yield from _check_embedding(args, options, stages)


def _check_embedding(args: Any, options: Options, stages: int) -> Iterator[str]:
    depth = argument(args, "mtp_num_layers") or 0
    if depth > 1:
        yield (
            f"{FLAG}: Megatron's schedule of pairs has one layer of multi-token prediction, not {depth}; set "
            "--mtp-num-layers 1 or omit one of them"
        )
    if depth and argument(args, "pack_documents"):
        yield (
            f"{FLAG}: Megatron's schedule of pairs has no multi-token prediction over packed documents; omit "
            "--pack-documents or --mtp-num-layers"
        )
    layers = layers_with_experts(args)
    if depth and layers and layers[-1] != argument(args, "num_layers"):
        yield (
            f"{FLAG}: Megatron's schedule of pairs has multi-token prediction with experts alone, and "
            "--moe-layer-freq gives the last layer none, from which it is built; omit --mtp-num-layers"
        )
    tied = argument(args, "untie_embeddings_and_output_weights") is False
    if stages == 1 and (depth or tied) and argument(args, "overlap_grad_reduce") and not options.counts_uses:
        user = "multi-token prediction uses" if depth else "the output layer shares"
        yield (
            f"{FLAG} without a pipeline: {user} the embedding's weight, which then has two backwards per "
            "microbatch, and this megatron-core's --overlap-grad-reduce expects one; upgrade to 0.16 or "
            "omit --overlap-grad-reduce"
        )


def _check_microbatches(args: Any) -> Iterator[str]:
    """Yield a problem if a step has too few microbatches to pair or to interleave."""
    ranks, steps = argument(args, "pipeline_model_parallel_size") or 1, batches.of_training(args)
    group = argument(args, "microbatch_group_size_per_vp_stage") or ranks
    needed = max(2, ranks)
    if steps is not None:
        # Without a pipeline a step of one microbatch runs by itself, until a schedule makes it larger.
        count = steps.microbatches if ranks > 1 else steps.most_microbatches
        if ranks == 1 and steps.flag == batches.RAMP:
            steps = replace(steps, flag=batches.GLOBAL)
        if count < needed:
            yield (
                f"{FLAG}: a step has {count} microbatch{'es' * (count != 1)}, which leaves nothing to pair; "
                f"use at least {needed} ({steps.enlarged(needed)})"
            )
    evaluation = batches.of_evaluation(args)
    interleaves = ranks > 1 and not is_v_shaped(args)
    if interleaves and evaluation is not None and (count := evaluation.microbatches) < group:
        yield (
            f"{FLAG}: an evaluation has {count} microbatch{'es' * (count != 1)}, and Megatron interleaves "
            f"{group} in a pipeline; use {evaluation.enlarged(group)}, or a smaller {evaluation.micro_flag}"
        )


def _check_recompute(args: Any) -> Iterator[str]:
    granularity = argument(args, "recompute_granularity")
    whole = granularity == "full" or (
        granularity == "selective" and "moe" in (argument(args, "recompute_modules") or ())
    )
    if not whole:
        return
    flag = "--recompute-granularity full" if granularity == "full" else "--recompute-modules moe"
    if argument(args, "distribute_saved_activations"):
        yield (f"{FLAG} with {flag} recomputes layers from whole inputs; omit --distribute-saved-activations")
    yield from check_history(
        args, f"{FLAG} with {flag}", "a layer would be recomputed with scales of later microbatches"
    )


def switch_on_paired_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``validate_args``: set ``overlap_moe_expert_parallel_comm`` in the arguments."""

    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        args.overlap_moe_expert_parallel_comm = True
        return original(args, *rest, **kwargs)

    return validate_args


def configure_paired_schedule(
    original: Callable[..., None], context: Context[Options]
) -> Callable[..., None]:
    """Wrap ``TransformerConfig.__post_init__``: enable the paired schedule for MoE models."""

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.num_moe_experts is None:
            original(self, *args, **kwargs)
            return
        require(context, check_overlap, self)
        # check_overlap replaces Megatron's own checks of the schedule, one of which refuses fp32.
        self.overlap_moe_expert_parallel_comm = False
        original(self, *args, **kwargs)
        self.overlap_moe_expert_parallel_comm = True

    return __post_init__


_PLAN = "megatron.core.models.common.model_chunk_schedule_plan:TransformerLayerSchedulePlan"
_HERE = "mindspeed_dsa.features.pipeline.fb_overlap"
_RANGE = ">=0.14,<0.21"
_WHOLE_LAYERS = (
    "--moe-fb-overlap takes the layer's forward apart, in which the other feature works; omit one of them"
)

FEATURE = Feature(
    name="moe-fb-overlap",
    summary="Runs one microbatch's forward and another's backward side by side, so that each hides the "
    "other's all-to-alls.",
    overlaps="all-to-alls of experts",
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
            f"{_HERE}.feature:switch_on_paired_schedule",
            "enables Megatron's combined 1F1B schedule, which this feature runs",
            params=("args",),
            required=False,
            priority=-1,
        ),
        Patch(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            "wrap",
            f"{_HERE}.feature:configure_paired_schedule",
            "enables the combined 1F1B schedule without Megatron's parser, and in fp32",
        ),
        Patch(
            f"{_PLAN}._build_callable_nodes",
            "wrap",
            f"{_HERE}.layer:cut_at_transfers",
            "cuts a layer's steps where its all-to-alls start and where they end",
            params=("event", "comp_stream", "comm_stream", "extra_args"),
        ),
        Patch(
            f"{_PLAN}.run",
            "wrap",
            f"{_HERE}.layer:run_pair",
            "orders a forward and a backward so that each computes under the other's transfers",
            params=("f_layer", "b_layer", "f_input", "b_grad", "is_last_layer_in_bwd"),
        ),
        Patch(
            f"{_PLAN}.release_state",
            "wrap",
            f"{_HERE}.layer:release_pieces",
            "frees a layer's graph with its backward",
            versions=">=0.16,<0.21",
        ),
        Patch(
            "megatron.core.transformer.moe.moe_layer:MoELayer.shared_experts_compute",
            "wrap",
            f"{_HERE}.layer:postpone_shared_expert",
            "postpones the shared expert to a step of its own, under the transfers",
            params=("hidden_states",),
            versions=">=0.16,<0.21",
        ),
        Patch(
            "megatron.core.pipeline_parallel.utils:ScheduleNode.default_backward_func",
            "wrap",
            f"{_HERE}.layer:run_what_learns",
            "skips steps without anything to learn, such as a frozen embedding, which autograd refuses",
            params=("outputs", "output_grad"),
        ),
        *ROWS,
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    conflicts=(
        Conflict(
            "moe-alltoall-overlap-comm",
            "both hide the same transfers, --moe-fb-overlap behind another microbatch; omit one of them",
        ),
        Conflict("dsa-warmup", _WHOLE_LAYERS),
    ),
    options=Options.of,
    rewrite=partial(run_shared_expert, flag=FLAG),
    check=check_overlap,
    doc="moe-fb-overlap.md",
)
