"""Feature that splits weight gradients off the backward in 1F1B pipelines, to fill bubbles (ZB-H1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.megatron import pipeline_steps
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.expert_parallel import DEFERRED_GRADIENTS, check_refused
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.megatron.low_precision import RECOMPUTED_BY_MEGATRON
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.spec import Patch

FLAG, WAITING = "--split-backward", "--split-backward-waiting"
DELAY = "--delay-wgrad-compute"


@dataclass(frozen=True)
class Options:
    """Options of the split backward.

    Attributes:
        waiting: largest number of backwards whose weight gradients may be deferred at a time. ``None``: as
            many as the schedule can use.
    """

    waiting: int | None = None

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings.

        Raises:
            SettingsError: a bound is given without the flag, or is negative.
        """
        waiting = settings.split_backward_waiting
        if waiting is not None and not splits_backward(settings):
            raise SettingsError(
                f"{WAITING} {waiting} bounds what waits with {FLAG}; add that, or omit the bound"
            )
        if waiting is not None and waiting < 0:
            raise SettingsError(f"{WAITING} is {waiting}; give 0, where none waits for long, or more")
        return cls(waiting)


def splits_backward(settings: Any) -> bool:
    """Return whether the split backward is set, by our flag or Megatron's."""
    return bool(getattr(settings, "split_backward", False)) or (
        delays_gradients(settings) and not argument(settings, "schedules_method")
    )


def delays_gradients(values: Any) -> bool:
    """Return whether ``--delay-wgrad-compute`` is set for local layers and a supported schedule."""
    return bool(
        argument(values, "delay_wgrad_compute")
        and argument(values, "transformer_impl") in (None, "local")
        and not _in_other_pairs(values)
    )


def _in_other_pairs(values: Any) -> bool:
    """Return whether Megatron's own overlap pairs forwards and backwards, on two streams."""
    return bool(
        argument(values, "overlap_moe_expert_parallel_comm") and not argument(values, "moe_fb_overlap")
    )


def detaches_gradients(settings: Any) -> bool:
    """Return whether DualPipeV defers weight gradients, by our flag or Megatron's."""
    return argument(settings, "schedules_method") == "dualpipev" and bool(
        argument(settings, "dualpipev_dw_detach") or delays_gradients(settings)
    )


def recomputes_later(settings: Any) -> bool:
    """Return whether weight gradients are deferred and Megatron's recomputation is on."""
    waits = splits_backward(settings) or detaches_gradients(settings)
    # That feature handles waiting gradients itself.
    return waits and "recompute-outputs" not in settings.features_on


def split_wanted(settings: Any) -> bool:
    """Return whether the split backward or its bound is set. A bound without the split is an error."""
    return splits_backward(settings) or settings.split_backward_waiting is not None


def serve_without_transformer_engine(args: Any, flag: str = FLAG) -> list[str]:
    """Clear ``--delay-wgrad-compute``, which Megatron refuses for local layers; a ``Feature.rewrite``.

    Args:
        args: job arguments, changed in place.
        flag: our flag that replaces ``--delay-wgrad-compute``, for the messages.

    Returns:
        Log messages, one per changed argument.
    """
    if not delays_gradients(args):
        return []
    args.delay_wgrad_compute = False
    return [f"weight gradients wait as with {flag}, which needs no Transformer Engine, for {DELAY}"]


_REFUSED = {
    "delay_wgrad_compute": "has Transformer Engine's layers keep their weight gradients",
    "defer_embedding_wgrad_compute": "moves the output layer's weight gradients elsewhere",
    "overlap_dispatch_backward_with_experts_wgrad": "places the experts' weight gradients elsewhere",
    "use_ring_exchange_p2p": "returns from a transfer when that is done, with nothing to compute meanwhile",
    "use_megatron_fsdp": "drops whole weights and gradients in backward",
    "use_custom_fsdp": "drops whole weights and gradients in backward",
    "cpu_offloading": "moves a layer's saved tensors at places in its backward",
}
"""Megatron arguments that are refused when set, with the reason."""


def check_split(args: Any, options: Any) -> Iterator[str]:
    """Yield a problem for jobs without a pipeline, and for settings that defer weight gradients otherwise."""
    if argument(args, "pipeline_model_parallel_size") == 1:
        yield (
            f"{FLAG} fills the waits of a pipeline, and there is none; set --pipeline-model-parallel-size or "
            "omit it"
        )
    if argument(args, "transformer_impl") not in (None, "local"):
        yield (
            f"{FLAG} needs Megatron's own linear layers; use --transformer-impl local, or Transformer "
            f"Engine's {DELAY} with --overlap-moe-expert-parallel-comm"
        )
    if argument(args, "schedules_method"):
        yield (
            f"{FLAG} splits backwards of 1F1B and interleaved pipelines; with --schedules-method "
            f"{argument(args, 'schedules_method')} use --dualpipev-dw-detach, or omit one of them"
        )
    if _in_other_pairs(args):
        yield f"{FLAG}: use --moe-fb-overlap in place of --overlap-moe-expert-parallel-comm"
    if argument(args, "num_microbatches_with_partial_activation_checkpoints"):
        yield f"{FLAG} knows one way to recompute in all microbatches; omit partial activation checkpoints"
    yield from check_refused(args, FLAG, _REFUSED)
    yield from refuse_graphs(args, FLAG, "a graph replays whole backwards")


def conflicts_of_waiting(flag: str, switch: str | None = None) -> tuple[Conflict, ...]:
    """Return the conflicts with other features that every feature with deferred weight gradients has.

    Args:
        flag: flag of the feature, for the messages.
        switch: setting that limits the conflict; see :class:`Conflict`.
    """
    chunked = (
        f"layers in chunks compute their weights' gradients beside their transfers, which {flag} leaves for "
        "later; omit one of them"
    )
    reasons = {
        "ascend-coc": chunked,
        "ascend-mc2": chunked,
        "moe-batch-overlap": "halves of a microbatch hide transfers behind weight gradients, which "
        f"{flag} leaves for later; omit one of them",
        "two-streams": f"{flag} keeps operands on the stream that they were made for, and a second one would "
        "still use them; omit one of them",
    }
    return tuple(Conflict(feature, why, switch) for feature, why in reasons.items())


_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_RANDOM = "megatron.core.tensor_parallel.random"
_OUTERMOST = 20
"""Patch priority: outside features that replace Megatron's recomputation."""
_HERE = "mindspeed_dsa.features.pipeline.split_backward.playing"
RECOMPUTED_LATER = Patch(
    f"{_RANDOM}:checkpoint",
    "wrap",
    f"{_HERE}:defer_in_recomputation",
    "has recomputed layers leave their weights' gradients for later as well",
    params=("function", "distribute_saved_activations"),
    priority=_OUTERMOST,
)
"""Patch for every feature that defers weight gradients: recomputed layers defer theirs too."""

OUTPUTS = Feature(
    name="split-backward-outputs",
    summary="Defers weight gradients also in modules whose outputs Megatron frees and recomputes; "
    "for split-backward and dualpipev.",
    flags=(),
    patches=(
        Patch(
            f"{_RANDOM}:CheckpointWithoutOutput.checkpoint",
            "wrap",
            f"{_HERE}:defer_where_outputs_are_discarded",
            "has recomputed projections leave their weights' gradients for later as well",
            params=("run_function",),
            priority=_OUTERMOST,
        ),
    ),
    requires=Requires(versions={"megatron-core": ">=0.12.1,<0.21"}),
    active=recomputes_later,
    doc="split-backward.md",
)

FEATURE = Feature(
    name="split-backward",
    summary="Computes and sends input gradients first, and computes weight gradients while a pipeline rank "
    "would wait (ZB-H1).",
    flags=(
        Flag(
            FLAG,
            "Split backwards of 1F1B and interleaved pipelines: gradients of inputs first, those of weights "
            "while transfers are on their way and in waits.",
        ),
        Flag(
            WAITING,
            "At most N weight gradients wait on a rank, each of one chunk and microbatch, with their "
            "operands; default: as many as the rank's number.",
            kind="value",
            type=int,
            metavar="N",
        ),
        Flag(DELAY, "Megatron's own; without Transformer Engine it asks for the same.", megatron=True),
        Flag("--transformer-impl", "Megatron's own.", kind="value", megatron=True),
        Flag("--overlap-moe-expert-parallel-comm", "Megatron's own.", megatron=True),
    ),
    patches=(
        *pipeline_steps.rows(
            f"{_HERE}:Player",
            "makes the list of a step's events and computes what waits before gradients are finalized",
            "has linear layers leave their weights' gradients for later",
            "advances to the weight gradients that the list has after a backward",
            "has a pair's forward leave its weights' gradients, and advances to those after its backward",
        ),
        Patch(
            f"{_P2P}:_p2p_ops",
            "wrap",
            f"{_HERE}:compute_while_sending",
            "computes weight gradients while the input's gradient is on its way",
            params=("tensor_send_prev",),
        ),
        Patch(
            f"{_P2P}:_batched_p2p_ops",
            "wrap",
            f"{_HERE}:compute_while_sending",
            "computes weight gradients while batched transfers are on their way",
            params=("tensor_send_prev",),
        ),
        RECOMPUTED_LATER,
        RECOMPUTED_BY_MEGATRON,
        DEFERRED_GRADIENTS,
    ),
    requires=Requires(versions={"megatron-core": ">=0.12.1,<0.21"}),
    conflicts=conflicts_of_waiting(FLAG),
    active=split_wanted,
    options=Options.of,
    rewrite=serve_without_transformer_engine,
    check=check_split,
    doc="split-backward.md",
)
