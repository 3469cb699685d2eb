"""Feature that recomputes a chunk in the time in which its pipeline rank would wait for a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.megatron import pipeline_steps
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.megatron.low_precision import RECOMPUTED_BY_MEGATRON
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options:
    """Options of early recomputation.

    Attributes:
        everywhere: whether to recompute before every wait for a gradient, not only in pipeline bubbles.
    """

    everywhere: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings."""
        return cls(everywhere=bool(settings.recompute_in_advance))


_WITHOUT_OUTPUT = {"layernorm", "mla_up_proj", "moe_act"}
"""Modules whose output Megatron frees, and recomputes in the backward of a later module."""
_READERS = {"layernorm": {"mlp", "moe", "shared_experts"}, "mla_up_proj": {"core_attn"}}
"""Modules that read the freed output of such a module, and cannot be recomputed before it is."""


def recompute_ahead_wanted(settings: Any) -> bool:
    """Return whether either of the two flags is set."""
    return bool(settings.recompute_in_bubble or settings.recompute_in_advance)


def check_recompute_ahead(args: Any, options: Any) -> Iterator[str]:
    """Report jobs without a pipeline, or without anything that Megatron's checkpoint recomputes."""
    both = args.recompute_in_bubble and args.recompute_in_advance
    flag = "--recompute-in-advance" if args.recompute_in_advance else "--recompute-in-bubble"
    if both:
        yield "--recompute-in-bubble and --recompute-in-advance exclude each other; omit one"
    if (argument(args, "pipeline_model_parallel_size") or 1) == 1:
        yield (
            f"{flag} fills the waits of a pipeline, and there is none; set --pipeline-model-parallel-size or "
            "omit it"
        )
    if argument(args, "recompute_granularity") is None:
        yield f"{flag} has nothing to recompute; add --recompute-granularity or omit it"
    modules = argument(args, "recompute_modules")
    selective = argument(args, "recompute_granularity") == "selective" and modules is not None
    if selective and not _ahead(args, set(modules)):
        yield (
            f"{flag}: nothing of --recompute-modules {' '.join(modules)} can be recomputed before its "
            "gradient is there; use core_attn, mlp, moe or shared_experts without layernorm and mla_up_proj, "
            "or omit it"
        )
    if argument(args, "distribute_saved_activations"):
        yield f"{flag} recomputes from whole inputs; omit --distribute-saved-activations"
    yield from refuse_graphs(args, flag, "a graph recomputes where it was captured, in backward")
    if argument(args, "fine_grained_activation_offloading"):
        yield (
            f"{flag} recomputes in another order than --fine-grained-activation-offloading brings "
            "activations back; omit one of them"
        )
    for name in ("use_megatron_fsdp", "use_custom_fsdp"):
        if argument(args, name):
            yield (
                f"{flag} recomputes layers when --{name.replace('_', '-')} has dropped their weights; omit "
                "one of them"
            )
    pairs = argument(args, "moe_fb_overlap")
    if argument(args, "overlap_moe_expert_parallel_comm") and not pairs:
        yield (
            f"{flag} recomputes whole forwards, which --overlap-moe-expert-parallel-comm takes apart; use "
            "--moe-fb-overlap in place of that, or omit one of them"
        )
    whole = argument(args, "recompute_granularity") == "full" or "moe" in (modules or ())
    if pairs and argument(args, "recompute_granularity") and not whole:
        yield (
            f"{flag} with --moe-fb-overlap recomputes layers, or what follows attention, ahead; use "
            "--recompute-granularity full, add moe to --recompute-modules, or omit it"
        )


def _ahead(args: Any, modules: set[str]) -> set[str]:
    """Return the recomputed modules whose input stays in memory, so that they can be recomputed early."""
    ready = modules - _WITHOUT_OUTPUT
    for name in _WITHOUT_OUTPUT & modules:
        ready -= _READERS.get(name, set())
    # The DSA indexer inside core_attn reads the norm's output, in addition to queries and keys.
    reads_norm = argument(args, "experimental_attention_variant") == "dsa" and "layernorm" in modules
    return ready - {"core_attn"} if reads_norm else ready


_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_OUTERMOST = 10
"""Patch priority: outside the feature that makes layers recompute."""
_HERE = "mindspeed_dsa.features.pipeline.recompute_ahead.ahead"

FEATURE = Feature(
    name="recompute-ahead",
    summary="Recomputes a chunk's activations while its pipeline rank waits for their gradient.",
    flags=(
        Flag(
            "--recompute-in-bubble",
            "Recompute ahead of gradients that a pipeline rank waits for: the first one, and the cooldown's.",
        ),
        Flag("--recompute-in-advance", "Recompute ahead of every gradient, in the steady phase too."),
    ),
    patches=(
        *pipeline_steps.rows(
            f"{_HERE}:Ahead",
            "reads the schedule's order of backwards when a step begins",
            "assigns checkpointed segments to their chunk and microbatch",
            "advances to the schedule's next backward",
            "follows a schedule of pairs",
            versions=">=0.14,<0.21",
        ),
        Patch(
            "megatron.core.models.common.model_chunk_schedule_plan:"
            "TransformerLayerSchedulePlan._build_callable_nodes",
            "wrap",
            f"{_HERE}:collect_layers",
            "collects the layers that a schedule of pairs recomputes",
            versions=">=0.14,<0.21",
            priority=_OUTERMOST,
        ),
        Patch(
            "megatron.core.tensor_parallel.random:checkpoint",
            "wrap",
            f"{_HERE}:checkpoint_ahead",
            "makes checkpointed segments that can be recomputed before their backward",
            params=("function", "distribute_saved_activations"),
        ),
        RECOMPUTED_BY_MEGATRON,
        Patch(
            f"{_P2P}:_p2p_ops",
            "wrap",
            f"{_HERE}:recompute_before_waiting",
            "recomputes before the overlapped schedule waits for a gradient",
            params=("tensor_recv_next",),
        ),
        Patch(
            f"{_P2P}:_batched_p2p_ops",
            "wrap",
            f"{_HERE}:recompute_before_waiting",
            "recomputes before batched transfers wait for a gradient",
            params=("tensor_recv_next",),
        ),
    ),
    active=recompute_ahead_wanted,
    options=Options.of,
    check=check_recompute_ahead,
    doc="recompute-ahead.md",
)
