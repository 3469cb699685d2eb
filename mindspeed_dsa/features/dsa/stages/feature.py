"""Flags and patches for the stages of DSA training, and for checkpoints between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from packaging.version import Version

from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature, Flag, Requires
from mindspeed_dsa.megatron import optimizer
from mindspeed_dsa.megatron.configuration import argument, hybrid_flag
from mindspeed_dsa.megatron.dsa import DSA, KERNELS, STAGES, Options, megatron_flag, uses_dsa
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.spec import Patch

WITHOUT_LOSS = ("dense", "frozen")
"""Stages in which indexers are not trained."""
_HERE = "mindspeed_dsa.features.dsa.stages"
_RELEASES = ">=0.12.1,<0.21"
_GPT = "megatron.core.models.gpt.gpt_model:GPTModel"


def stage_wanted(settings: Any) -> bool:
    """Return whether the job runs a stage other than the default."""
    return Options.of(settings).stage != "sparse"


def warmup_wanted(settings: Any) -> bool:
    """Return whether the job runs ``--dsa-stage warmup``."""
    return Options.of(settings).warmup


def drop_loss(args: Any) -> Sequence[str]:
    """Set the loss coefficient to 0 in stages that do not train indexers; a ``Feature.rewrite``."""
    stage, coefficient = Options.of(args).stage, getattr(args, "dsa_indexer_loss_coeff", None)
    if stage not in WITHOUT_LOSS or not coefficient or coefficient <= 0:
        return ()
    args.dsa_indexer_loss_coeff = 0.0
    return (f"--dsa-stage {stage} trains no indexer: --dsa-indexer-loss-coeff {coefficient:g} is taken as 0",)


def check_stage(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem per argument that the stage does not support; skip those that ``args`` lacks."""
    if getattr(args, "experimental_attention_variant", "dsa") != "dsa":
        yield (
            f"--dsa-stage {options.stage} is about DSA's indexer, and the model has none; add "
            "--experimental-attention-variant dsa"
        )
    if flag := hybrid_flag(args):
        yield (
            f"--dsa-stage {options.stage} trains parts of GPT models alone, not of those of {flag}; omit one "
            "of them"
        )
    if options.warmup and not (getattr(args, "dsa_indexer_loss_coeff", 1.0) or 0.0) > 0:
        yield "--dsa-stage warmup trains by the indexer loss alone; set --dsa-indexer-loss-coeff above 0"
    if options.warmup:
        yield from refuse_graphs(
            args, "--dsa-stage warmup", "its layers have no backward for a graph, only their indexers have"
        )
        yield from _check_frozen_embedding(args)


def _check_frozen_embedding(args: Any) -> Iterator[str]:
    """Yield a problem if Megatron sums the gradients of two copies of a frozen embedding."""
    release = versions.of_job(args) or "0.13"
    is_tied = argument(args, "untie_embeddings_and_output_weights") is False
    has_copies = (argument(args, "pipeline_model_parallel_size") or 1) > 1 and (
        is_tied or argument(args, "mtp_num_layers")
    )
    if has_copies and Version(release) < Version("0.13"):
        yield (
            f"--dsa-stage warmup freezes the embedding, and Megatron-core {release} sums the gradients of "
            "its copies in a pipeline with tied embeddings or multi-token prediction; use Megatron-core 0.13 "
            "or later, or one pipeline stage"
        )


_STAGE = Flag(
    "--dsa-stage",
    "Stage of DSA training: 'dense' has indexers that nothing reads or trains; 'warmup' trains indexers "
    "alone, beside dense attention; 'sparse' trains all; 'frozen' selects keys by indexers that are not "
    "trained.",
    kind="value",
    default="sparse",
    choices=STAGES,
)
_FLAGS = (_STAGE, EXPERIMENTAL_ATTENTION_VARIANT, megatron_flag("--dsa-indexer-loss-coeff", float))

STAGE = Feature(
    name="dsa-stage",
    summary="Stages of DSA training: dense attention, warm-up, sparse attention, frozen indexers.",
    flags=_FLAGS,
    requires=Requires(versions={"megatron-core": _RELEASES}),
    active=stage_wanted,
    options=Options.of,
    rewrite=drop_loss,
    check=check_stage,
    doc="dsa-stage.md",
    patches=(
        Patch(
            f"{_GPT}.__init__",
            "wrap",
            f"{_HERE}.parameters:freeze_for_stage",
            "frozen parameters must be neither in gradient buffers nor in the optimizer",
            versions=_RELEASES,
        ),
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_HERE}.megatron_attention:attend_by_stage",
            "Megatron's DSA attends sparsely from the first step on",
            params=("query", "key", "value", "attention_mask", "x", "qr", "up_v_weight"),
            versions=KERNELS,
            priority=100,  # outside the wrappers for sparse attention
        ),
    ),
)
WARMUP = Feature(
    name="dsa-warmup",
    summary="Layers of the indexers' warm-up run without a graph: only the indexer losses have one.",
    flags=_FLAGS,
    requires=Requires(versions={"megatron-core": _RELEASES}),
    active=warmup_wanted,
    options=Options.of,
    doc="dsa-stage.md",
    when="--dsa-stage warmup",
    patches=(
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.forward",
            "wrap",
            f"{_HERE}.warmup:layer_without_graph",
            "a frozen layer needs no activations in backward",
            versions=_RELEASES,
        ),
    ),
)


def _rows(method: str, implementation: str, why: str, *classes: str) -> Iterator[Patch]:
    """Yield a patch of ``method`` per optimizer class; it wraps outside those that move optimizer state."""
    for optimizer_class in classes:
        yield Patch(
            f"{optimizer_class}.{method}",
            "wrap",
            f"{_HERE}.checkpoint:{implementation}",
            why,
            versions=_RELEASES,
            priority=1,
        )


_ALL = (optimizer.FLOAT16, optimizer.FLOAT32, optimizer.DISTRIBUTED)
CHECKPOINTS = Feature(
    name="dsa-stage-checkpoints",
    summary="Checkpoints go from one stage of DSA training to the next, where the optimizer begins anew.",
    flags=_FLAGS,
    active=uses_dsa,
    options=Options.of,
    doc="dsa-stage.md",
    when="the model uses DSA",
    patches=(
        Patch(
            f"{_GPT}.__init__",
            "wrap",
            f"{_HERE}.layers:note_model",
            "nothing tells indexers' parameters from others, or names the layer of one that is missing",
            versions=_RELEASES,
        ),
        Patch(
            "megatron.core.transformer.transformer_block:TransformerBlock.sharded_state_dict",
            "wrap",
            f"{_HERE}.layers:number_sharing_layers",
            "a checkpoint stacks layers as if all had an indexer",
            params=("prefix", "sharded_offsets", "metadata"),
            versions=_RELEASES,
        ),
        Patch(
            "megatron.core.dist_checkpointing.serialization:load",
            "wrap",
            f"{_HERE}.checkpoint:load_across_stages",
            "a checkpoint of another stage has the optimizer's state of other parameters",
            params=("sharded_state_dict", "checkpoint_dir"),
            versions=_RELEASES,
        ),
        *_rows(
            "__init__",
            "name_stage",
            "a checkpoint does not name its stage, and weight decay shrinks indexers that have no loss",
            *_ALL,
        ),
        *_rows(
            "sharded_state_dict",
            "save_stage",
            "the stage must be known before sharded objects are read",
            optimizer.DISTRIBUTED,
        ),
        *_rows(
            "load_state_dict",
            "load_state",
            "a state of another stage has other parameters",
            *_ALL,
            optimizer.CHAINED,
        ),
        *_rows(
            "load_parameter_state_from_dp_zero",
            "load_parameters",
            "the distributed optimizer's buffers of another stage have other parameters",
            optimizer.DISTRIBUTED,
        ),
    ),
)
