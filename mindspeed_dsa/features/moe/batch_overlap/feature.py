"""Feature that splits a microbatch in two halves: one half computes while the other is in transfer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.dsa import OWN_LOOP, uses_dsa
from mindspeed_dsa.megatron.dsa import Options as DSAOptions
from mindspeed_dsa.megatron.expert_parallel import (
    ROWS,
    check_all_to_all,
    check_experts,
    check_refused,
    expert_tensor_ranks,
    number_of_experts,
)
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.megatron.low_precision import check_rows_together
from mindspeed_dsa.megatron.measured import check_measured
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options:
    """Options of ``--moe-batch-overlap``.

    Attributes:
        switched_on: whether ``--moe-batch-overlap`` is set.
        always: whether layers run in halves without measuring the gain first.
        attention: whether attention runs in halves too. ``None``: wherever that is supported.
        sparse_rows: whether sparse attention supports fewer queries than keys.
        weighs_again: whether the indexer loss can be weighted by the half's size even if core attention is
            recomputed.
        warmup: whether this is the DSA warmup stage, in which only indexers are trained and layers build no
            graph.
    """

    switched_on: bool
    always: bool
    attention: bool | None
    sparse_rows: bool
    weighs_again: bool
    warmup: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings, or from arguments."""
        release = versions.of_job(settings)
        own_loop = release is not None and SpecifierSet(OWN_LOOP, prereleases=True).contains(release)
        return cls(
            switched_on=bool(getattr(settings, "moe_batch_overlap", False)),
            always=bool(getattr(settings, "moe_batch_overlap_always", False)),
            attention=getattr(settings, "moe_batch_overlap_attention", None),
            sparse_rows=own_loop and DSAOptions.of(settings).all_ours,
            weighs_again=own_loop,
            warmup=DSAOptions.of(settings).warmup,
        )


def wanted(settings: Any) -> bool:
    """Return whether the flag or any of its options is set; options without the flag are an error."""
    options = Options.of(settings)
    return options.switched_on or options.always or bool(options.attention)


_FLAG = "--moe-batch-overlap"
_ALWAYS = "--moe-batch-overlap-always"
_ATTENTION = "--moe-batch-overlap-attention"
_REFUSED = {
    "moe_pad_expert_input_to_capacity": (
        "gives each expert a fixed number of rows of the whole microbatch; without it, capacity works"
    ),
    "moe_shared_expert_overlap": "puts the shared expert under the transfers of the whole microbatch",
    "overlap_moe_expert_parallel_comm": "hides the same transfers behind another microbatch",
    "delay_wgrad_compute": "computes the weight gradients that lie under the transfers at another place",
    "overlap_dispatch_backward_with_experts_wgrad": "puts the same weight gradients under one transfer",
    "fine_grained_activation_offloading": "moves activations of whole microbatches, in their order",
    "moe_paged_stash": "moves activations of whole microbatches, in their order",
    "moe_routing_trace_path": "records one routing for each layer and microbatch",
    "use_megatron_fsdp": "takes weight gradients before those under the transfers are there",
    "use_custom_fsdp": "takes weight gradients before those under the transfers are there",
}
"""Megatron arguments that are refused when set, with the reason."""


def check_halves(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem for each argument or configuration field that prevents halves or overlap."""
    if not options.switched_on:
        for flag, value in ((_ALWAYS, options.always), (_ATTENTION, options.attention)):
            if value:
                yield f"{flag} has no effect without {_FLAG}; add that or omit it"
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
    yield from refuse_graphs(args, _FLAG, "a graph holds each transfer at a fixed place")
    yield from check_rows_together(args, _FLAG, "halves would have scales of their own")
    if not options.always and argument(args, "moe_enable_routing_replay"):
        yield (
            f"{_FLAG} measures with forwards that --moe-enable-routing-replay would count as the step's; add "
            f"{_ALWAYS}"
        )


_REFUSED_WITH_ATTENTION = {
    "moe_expert_capacity_factor": "drops tokens of the whole microbatch before any of them is sent",
    "moe_input_jitter_eps": "draws other random numbers for halves than for the whole",
    "moe_router_force_load_balancing": "draws other random numbers for halves than for the whole",
    "moe_router_force_biased": "draws other random numbers for halves than for the whole",
    "hidden_dropout": "draws other random numbers for halves than for the whole",
    "attention_dropout": "draws other random numbers for halves than for the whole",
    "moe_enable_routing_replay": "counts one routing for each layer and microbatch",
    "pack_documents": "has one row of tokens for a microbatch, and no whole sequences to cut it by",
    "reset_position_ids": "has one row of tokens for a microbatch, and no whole sequences to cut it by",
    "cpu_offloading": "moves activations of one microbatch after the other",
}
"""Arguments that are also refused if attention is cut, with the reason."""


def check_attention(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem for each setting with which attention in halves would change the result."""
    yield from check_refused(args, _ATTENTION, _REFUSED_WITH_ATTENTION)
    if options.warmup:
        yield (
            f"{_ATTENTION} takes apart the layer that --dsa-stage warmup runs without a graph; omit "
            f"{_ATTENTION}"
        )
    if "sinkhorn" in (argument(args, "moe_router_load_balancing_type") or ()):
        yield (
            f"{_ATTENTION} routes one half before the other is there, and sinkhorn balances all tokens; use "
            f"--moe-router-load-balancing-type aux_loss, or omit {_ATTENTION}"
        )
    selective = argument(args, "recompute_granularity") == "selective"
    if selective and "moe" in (argument(args, "recompute_modules") or ()):
        yield (
            f"{_ATTENTION} takes apart the layer that --recompute-modules moe recomputes in one piece; use "
            f"--recompute-granularity full, other modules, or omit {_ATTENTION}"
        )
    if uses_dsa(args):
        yield from _check_dsa(args, options)


_ONE_SEQUENCE = f"{_ATTENTION} cuts a microbatch of one sequence by its rows"
_TWO = f"use --micro-batch-size 2, or omit {_ATTENTION}"


def check_rows(args: Any, options: Options, length: int) -> Iterator[str]:
    """Yield a problem for each setting that prevents splitting a single sequence into two halves.

    Args:
        args: job arguments, or a model configuration.
        options: the feature's options.
        length: number of tokens of the sequence.
    """
    if argument(args, "sequence_parallel"):
        yield f"{_ONE_SEQUENCE}, and --sequence-parallel has ranks hold neighbours in the sequence; {_TWO}"
    if argument(args, "apply_rope_fusion"):
        yield (
            f"{_ONE_SEQUENCE}, and fused RoPE computes angles from the first place on; add --no-rope-fusion, "
            f"{_TWO}"
        )
    if (argument(args, "context_parallel_size") or 1) > 1:
        yield f"{_ONE_SEQUENCE}, which --context-parallel-size has cut already; {_TWO}"
    if length % 2:
        yield f"{_ONE_SEQUENCE}, of which {length} is no even number; {_TWO}"
    if argument(args, "multi_latent_attention") is False:
        yield f"{_ONE_SEQUENCE} with latent attention alone; {_TWO}"
    elif uses_dsa(args) and not options.sparse_rows:
        yield (
            f"{_ONE_SEQUENCE} on operators that know fewer rows than keys: all of --use-fused-dsa, on "
            f"megatron-core 0.16 to 0.18; {_TWO}"
        )
    elif not uses_dsa(args) and argument(args, "transformer_impl") == "transformer_engine":
        yield f"{_ONE_SEQUENCE} with --transformer-impl local alone; {_TWO}"
    selective = argument(args, "recompute_granularity") == "selective"
    if selective and "mla_up_proj" in (argument(args, "recompute_modules") or ()):
        yield (
            f"{_ONE_SEQUENCE}, and --recompute-modules mla_up_proj frees keys that the second half reads; "
            f"recompute other modules, {_TWO}"
        )


def _check_dsa(args: Any, options: Options) -> Iterator[str]:
    if Sharing.of(args).is_on:
        yield (
            f"{_ATTENTION}: layers that share a selection would read that of the other half; omit "
            f"{_ATTENTION}, with which tokens are cut behind attention"
        )
    if not (argument(args, "dsa_indexer_loss_coeff") or 0) > 0:
        return
    selective = argument(args, "recompute_granularity") == "selective"
    if selective and "core_attn" in (argument(args, "recompute_modules") or ()) and not options.weighs_again:
        yield (
            f"{_ATTENTION}: --recompute-modules core_attn computes the indexer loss of a half again as if it "
            "were the whole, but on megatron-core 0.16 to 0.18; use --recompute-granularity full, or omit "
            f"{_ATTENTION}"
        )
    if argument(args, "calculate_per_token_loss"):
        yield (
            f"{_ATTENTION} weighs halves of an indexer loss that is a mean, and --calculate-per-token-loss "
            "makes it a sum; omit one of them"
        )


def check_arguments(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem for each job argument that is incompatible with the feature."""
    yield from check_halves(args, options)
    yield from check_choice(args, options)
    if options.switched_on and options.attention:
        yield from check_attention(args, options)
        if argument(args, "micro_batch_size") == 1:
            yield from check_rows(args, options, argument(args, "seq_length") or 0)


def check_choice(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem in deterministic training, where the decision must not depend on measured times."""
    if options.switched_on and not options.always:
        yield from check_measured(args, _FLAG, "whether halves pay", f"add {_ALWAYS}")


_LAYER = "megatron.core.transformer.moe.moe_layer:MoELayer"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_HERE = "mindspeed_dsa.features.moe.batch_overlap"
_IMPL = f"{_HERE}.layer"
_RANGE = ">=0.14,<0.21"
_OUTERMOST = 10
"""Patch priority: outermost, so that other features' wrappers run only for an uncut microbatch."""

FEATURE = Feature(
    name="moe-batch-overlap",
    summary="Runs a microbatch in two halves, one of which attends or computes while the other travels.",
    overlaps="all-to-alls of experts",
    flags=(
        Flag(
            "--moe-batch-overlap",
            "Hide dispatch and combine of MoE layers behind the other half of the same microbatch's tokens, "
            "where that was measured to be faster.",
        ),
        Flag("--moe-batch-overlap-always", "Cut the tokens without measuring."),
        Flag(
            "--moe-batch-overlap-attention",
            "Cut a microbatch's sequences before attention, which then hides transfers of the other half. "
            "Default: where that gives the same results.",
            kind="auto",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.forward",
            "wrap",
            f"{_HERE}.attention:run_halves",
            "runs attention of one half under the transfers of the other",
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            "megatron.core.transformer.transformer_block:TransformerBlock.forward",
            "wrap",
            f"{_HERE}.attention:run_in_block",
            "hands halves on from layer to layer",
            versions=_RANGE,
        ),
        Patch(
            "megatron.core.transformer.moe.router:TopKRouter.routing",
            "wrap",
            f"{_HERE}.routing:route_halves",
            "routes halves one after the other, with the losses of the whole microbatch",
            params=("logits",),
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
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
    ),
    active=wanted,
    options=Options.of,
    check=check_arguments,
    doc="moe-batch-overlap.md",
)
