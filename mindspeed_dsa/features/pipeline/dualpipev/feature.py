"""Feature ``dualpipev``: DualPipeV schedule, with two chunks per pipeline rank placed in the shape of a V."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from mindspeed_dsa.feature import Conflict, Context, Feature, Flag, Requires
from mindspeed_dsa.features.pipeline.split_backward.feature import (
    DELAY,
    RECOMPUTED_LATER,
    conflicts_of_waiting,
    detaches_gradients,
    serve_without_transformer_engine,
)
from mindspeed_dsa.megatron import across_layouts, batches
from mindspeed_dsa.megatron.configuration import argument, require
from mindspeed_dsa.megatron.expert_parallel import DEFERRED_GRADIENTS, check_refused
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.megatron.low_precision import RECOMPUTED_BY_MEGATRON
from mindspeed_dsa.megatron.pipeline_chunks import LAYOUT, nearly_even, stages_of
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.spec import Patch

FLAG = "--schedules-method dualpipev"
DETACH = "--dualpipev-dw-detach"
CHUNKS = 2
"""Number of model chunks per rank."""


@dataclass(frozen=True)
class Options:
    """Options of DualPipeV, including capabilities of the Megatron release.

    Attributes:
        places_prediction: whether Megatron's pipeline layout also places multi-token prediction layers.
        paired: whether forwards and backwards run as pairs (``--moe-fb-overlap``).
        split: whether weight gradients that would delay another rank are deferred.
    """

    places_prediction: bool
    paired: bool
    split: bool = False

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings, or from arguments."""
        release = versions.of_job(settings)
        return cls(
            places_prediction=release is None or Version(release) >= Version("0.16.0"),
            paired=bool(getattr(settings, "moe_fb_overlap", False)),
            split=detaches_gradients(settings),
        )


def dualpipev_wanted(settings: Any) -> bool:
    """Return whether the schedule or a flag of it is set. A flag without the schedule is an error."""
    return settings.schedules_method == "dualpipev" or bool(settings.dualpipev_dw_detach)


# -- layers of the chunks ----------------------------------------------------------------------------

_OTHER_SPLITS = {
    "num_layers_per_virtual_pipeline_stage": "--num-layers-per-virtual-pipeline-stage",
    "num_virtual_stages_per_pipeline_rank": "--num-virtual-stages-per-pipeline-rank",
    "decoder_first_pipeline_num_layers": "--decoder-first-pipeline-num-layers",
    "decoder_last_pipeline_num_layers": "--decoder-last-pipeline-num-layers",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "account_for_embedding_in_pipeline_split": "--account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split",
}
"""Other flags that distribute layers: dict from argument or configuration field to flag."""


def even_layout(args: Any) -> str | None:
    """Return a layout with equal chunks. ``None`` if one is given or the layers do not divide evenly.

    Args:
        args: job arguments, or a model configuration.
    """
    layers, ranks = argument(args, "num_layers"), argument(args, "pipeline_model_parallel_size") or 1
    if ranks == 1 or not layers or argument(args, "pipeline_model_parallel_layout") is not None:
        return None
    if layers % (CHUNKS * ranks) or any(argument(args, name) for name in _OTHER_SPLITS):
        return None
    return nearly_even(layers, CHUNKS * ranks, argument(args, "mtp_num_layers") or 0)


def deal_out(args: Any) -> list[str]:
    """Set a layout with equal chunks, unless the job has a layout; return log messages."""
    layout = even_layout(args)
    if layout is None or not hasattr(args, "pipeline_model_parallel_layout"):
        return []
    args.pipeline_model_parallel_layout = layout
    return [f"{FLAG} deals layers out as {LAYOUT} '{layout}', the last of them on the first rank again"]


def rewrite_arguments(args: Any) -> list[str]:
    """Set the layout, and replace ``--delay-wgrad-compute`` by our deferral; a ``Feature.rewrite``."""
    return [*deal_out(args), *serve_without_transformer_engine(args, DETACH)]


def check_chunks_of_v(args: Any) -> Iterator[str]:
    """Yield reasons why the layers cannot be split into V-shaped chunks."""
    ranks = argument(args, "pipeline_model_parallel_size") or 1
    if ranks == 1:
        yield f"{FLAG} needs a pipeline; set --pipeline-model-parallel-size to 2 or more, or omit it"
        return
    others = sorted({flag for name, flag in _OTHER_SPLITS.items() if argument(args, name)})
    if others:
        yield (
            f"{FLAG} gives each rank two chunks by itself; omit {' and '.join(others)}, and use {LAYOUT} for "
            "chunks of different sizes"
        )
        return
    layers, stages = argument(args, "num_layers"), CHUNKS * ranks
    layout = argument(args, "pipeline_model_parallel_layout")
    mtp_layers = argument(args, "mtp_num_layers") or 0
    try:
        listed = stages_of(layout)
    except ValueError as error:
        yield f"{FLAG}: {error}"
        return
    if layout is None and layers and layers % stages:
        yield (
            f"{FLAG}: --num-layers {layers} cannot be dealt out to {stages} equal chunks, two on each of "
            f"{ranks} ranks; give their sizes, as {LAYOUT} '{nearly_even(layers, stages, mtp_layers)}'"
        )
    elif listed and len(listed) != stages:
        yield (
            f"{FLAG}: {LAYOUT} has {len(listed)} chunks, and {ranks} ranks with two chunks each need {stages}"
        )
    elif listed and any("m" in stage for stage in listed[:-1]):
        yield f"{FLAG}: layers of multi-token prediction follow the decoder's last; end {LAYOUT} with mL"


# -- combinations ------------------------------------------------------------------------------------

_REFUSED = {
    "defer_embedding_wgrad_compute": "postpones gradients to the end of another schedule",
    "num_microbatches_with_partial_activation_checkpoints": "counts microbatches of another schedule",
    "recompute_in_bubble": "recomputes where another schedule waits",
    "recompute_in_advance": "recomputes in the order of another schedule",
    "use_megatron_fsdp": "gathers weights in the order of another schedule",
    "delay_wgrad_compute": "computes weight gradients at places of another schedule",
    "iterations_to_skip": "reads batches as of a model with one chunk on each rank",
    "moe_paged_stash": "is reset by Megatron's own schedules alone, and does nothing in another one",
    "variable_seq_lengths": "announces the length of each sequence to the next rank first",
    "fine_grained_activation_offloading": "moves activations in the order of another schedule",
    "cpu_offloading": "moves activations in the order of another schedule",
    "hybrid_context_parallel": "has a schedule of its own",
    "is_hybrid_model": "has a model of its own, whose layers are dealt out by their pattern",
    "hybrid_override_pattern": "has a model of its own, whose layers are dealt out by their pattern",
    "hybrid_layer_pattern": "has a model of its own, whose layers are dealt out by their pattern",
}
"""Arguments that are refused when set, with the reason."""


def check_dualpipev(args: Any, options: Options) -> Iterator[str]:
    """Yield problems with job arguments or a model configuration."""
    # Model configurations have no schedules_method.
    if argument(args, "schedules_method") != "dualpipev" and hasattr(args, "schedules_method"):
        yield f"{DETACH} is about a schedule that is not chosen; add {FLAG}, or omit it"
        return
    if argument(args, "dualpipev_dw_detach") and argument(args, "transformer_impl") not in (None, "local"):
        yield (
            f"{DETACH} of {FLAG} needs Megatron's own linear layers; use --transformer-impl local or omit it"
        )
    if "megatron.bridge.training.train" in sys.modules:  # and not only its conversion of weights
        yield (
            f"{FLAG}: Megatron-Bridge's loop reads losses on the rank where the model ends, and they are "
            "reported on the last rank; omit it"
        )
    yield from check_chunks_of_v(args)
    yield from _check_microbatches(args)
    yield from batches.check_conversations(args, FLAG)
    yield from check_refused(args, FLAG, _REFUSED)
    yield from refuse_graphs(args, FLAG, "Megatron captures the order of another schedule")
    if argument(args, "overlap_moe_expert_parallel_comm") and not options.paired:
        yield f"{FLAG}: use --moe-fb-overlap in place of --overlap-moe-expert-parallel-comm"
    if argument(args, "mtp_num_layers") and not options.places_prediction:
        yield (
            f"{FLAG}: this megatron-core builds multi-token prediction on the last rank alone, where the "
            "model does not end; upgrade to 0.16 or omit --mtp-num-layers"
        )
    if argument(args, "mtp_num_layers") and argument(args, "untie_embeddings_and_output_weights") is False:
        yield (
            f"{FLAG}: Megatron cannot save a pipeline with multi-token prediction and tied embeddings; add "
            "--untie-embeddings-and-output-weights or omit --mtp-num-layers"
        )
    format_ = argument(args, "ckpt_format")
    if format_ not in (None, "torch_dist") and (argument(args, "save") or argument(args, "load")):
        yield (
            f"{FLAG}: files of --ckpt-format {format_} do not say which layers a rank has; use --ckpt-format "
            "torch_dist"
        )
    if _saves_slices(args):
        yield (
            f"{FLAG}: the distributed optimizer's state would be slices of buffers, which do not say which "
            "layers they are of; add --dist-ckpt-optim-fully-reshardable"
        )
    elif (
        argument(args, "use_distributed_optimizer") and argument(args, "non_persistent_ckpt_type") == "local"
    ):
        yield (
            f"{FLAG}: --non-persistent-ckpt-type local saves slices of the distributed optimizer's buffers, "
            "which do not say which layers they are of; use global"
        )


def _saves_slices(args: Any) -> bool:
    """Return whether optimizer state is saved or loaded in an order that depends on the layout."""
    name = "dist_ckpt_optim_fully_reshardable"
    if not argument(args, "use_distributed_optimizer") or getattr(args, name, True):
        return False
    saves = argument(args, "save") and not argument(args, "no_save_optim")
    loads = argument(args, "load") and not argument(args, "no_load_optim")
    return bool(saves or loads)


def _check_microbatches(args: Any) -> Iterator[str]:
    """Yield a problem for too few microbatches in training; evaluation accepts any number."""
    ranks, steps = argument(args, "pipeline_model_parallel_size") or 1, batches.of_training(args)
    needed = CHUNKS * ranks
    if steps is not None and (count := steps.microbatches) < needed:
        yield (
            f"{FLAG}: a step has {count} microbatch{'es' * (count != 1)}, and {ranks} pipeline ranks need at "
            f"least {needed}; use {steps.enlarged(needed)} or more, or a smaller --micro-batch-size"
        )


def refuse_before_megatron(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``validate_args``: check the layers first, because Megatron's own message would mislead."""

    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        if argument(args, "schedules_method") == "dualpipev":
            require(context, lambda arguments, _: check_chunks_of_v(arguments), args)
        return original(args, *rest, **kwargs)

    return validate_args


_PLACEMENT = "mindspeed_dsa.features.pipeline.dualpipev.placement"
_TIED = "mindspeed_dsa.features.pipeline.dualpipev.tied_weights"
_OUTERMOST = 10
"""Patch priority: outside features that ask a configuration for its chunks."""
_RANGE = ">=0.14,<0.21"

FEATURE = Feature(
    name="dualpipev",
    summary="Trains a pipeline whose ranks hold two chunks in the shape of a V, in DualPipeV's order.",
    overlaps="messages between pipeline ranks",
    flags=(
        Flag(
            "--schedules-method",
            "Schedule of the pipeline: dualpipev, two chunks on each rank in the shape of a V.",
            kind="value",
            choices=("dualpipev",),
        ),
        Flag(
            DETACH,
            "Compute those of DualPipeV's weight gradients that would hold up another rank later.",
        ),
    ),
    patches=(
        Patch(
            "megatron.training.arguments:validate_args",
            "wrap",
            "mindspeed_dsa.features.pipeline.dualpipev.feature:refuse_before_megatron",
            "says which layout fits layers that two chunks per rank do not divide",
            params=("args",),
            required=False,
            priority=-1,
        ),
        Patch(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            "wrap",
            f"{_PLACEMENT}:lay_out",
            "gives the model a layout whose second half returns over the ranks",
            priority=_OUTERMOST,
        ),
        Patch(
            "megatron.core.parallel_state:is_pipeline_last_stage",
            "wrap",
            f"{_PLACEMENT}:ends_on_first_rank",
            "finds the model's end in the second chunk of the first rank",
            params=("ignore_virtual", "vp_stage"),
        ),
        Patch(
            "megatron.core.pipeline_parallel.utils:is_pp_last_stage",
            "wrap",
            f"{_PLACEMENT}:last_is_first",
            "finds the model's end on the first rank, for modules that ask for the chunk beside it",
            params=("pp_group",),
        ),
        *(
            Patch(
                f"megatron.training.training:{name}",
                "wrap",
                f"{_PLACEMENT}:report_on_last_rank",
                "asks which rank reports losses by the function that says where the model ends",
                versions=">=0.19",
                required=False,  # where megatron.training is not installed
            )
            for name in ("train_step", "evaluate")
        ),
        Patch(
            "megatron.training.utils:get_batch_on_this_tp_rank",
            "wrap",
            f"{_PLACEMENT}:hand_out_whole_batches",
            "hands the first rank's tensor parallel ranks labels beside tokens",
            versions="<0.18",
            required=False,  # where megatron.training is not installed
        ),
        Patch(
            "megatron.core.utils:get_batch_on_this_tp_rank",
            "wrap",
            f"{_PLACEMENT}:hand_out_as_one_stage",
            "hands the first rank labels beside tokens",
            params=("pipeline_model_parallel_size",),
            versions=">=0.18",
        ),
        Patch(
            "megatron.core.parallel_state:initialize_model_parallel",
            "wrap",
            f"{_TIED}:embed_on_first_rank",
            "makes a group of the one rank that has the embedding and its copy",
            params=("get_embedding_ranks",),
        ),
        Patch(
            "megatron.core.models.common.language_module.language_module:"
            "LanguageModule.setup_embeddings_and_output_layer",
            "wrap",
            f"{_TIED}:copy_embedding",
            "copies the embedding's weight to the chunk that ends the model",
        ),
        Patch(
            "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
            "wrap",
            f"{_TIED}:add_gradients",
            "adds the gradients of the embedding and its copy, which one rank has",
            params=("model", "config"),
        ),
        Patch(
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            "wrap",
            "mindspeed_dsa.features.pipeline.dualpipev.step:play_the_list",
            "runs forwards and backwards in the order of DualPipeV's list",
            priority=-1,
        ),
        RECOMPUTED_LATER,
        RECOMPUTED_BY_MEGATRON,
        DEFERRED_GRADIENTS,
        *across_layouts.ROWS,
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    conflicts=(
        Conflict(
            "recompute-ahead",
            "--recompute-in-bubble and --recompute-in-advance follow the order of Megatron's schedules; omit "
            "them or --schedules-method",
        ),
        Conflict(
            "split-backward",
            f"--split-backward follows the order of Megatron's schedules; use {DETACH} instead",
        ),
        *conflicts_of_waiting(DETACH, "dualpipev_dw_detach"),
        *conflicts_of_waiting(DELAY, "delay_wgrad_compute"),
    ),
    active=dualpipev_wanted,
    options=Options.of,
    rewrite=rewrite_arguments,
    check=check_dualpipev,
    doc="dualpipev.md",
)
