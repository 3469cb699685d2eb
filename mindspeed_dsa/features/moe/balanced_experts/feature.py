"""Expert load balancing: send an overloaded expert's weights to the ranks that have tokens for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.expert_parallel import (
    check_experts,
    check_refused,
    expert_tensor_ranks,
    number_of_experts,
)
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.megatron.low_precision import check_own_products
from mindspeed_dsa.megatron.measured import check_measured
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options:
    """Options of ``--balanced-moe-experts``.

    Attributes:
        switched_on: whether ``--balanced-moe-experts`` is set.
        hot_experts: largest number of experts whose weights are sent per layer; ``None``: as many as pay.
        matmul_rate: TFLOP/s of one rank, or ``None`` to measure it.
        link_rate: GB/s of a rank's link in one direction, or ``None`` to measure it.
        follows_pieces: whether ``--moe-fb-overlap`` splits layers into parts with separate graphs. Then a
            :class:`~mindspeed_dsa.megatron.split_layers.Companion` carries this feature's tensors between the
            parts.
    """

    switched_on: bool
    hot_experts: int | None
    matmul_rate: float | None
    link_rate: float | None
    follows_pieces: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings, or from arguments."""
        return cls(
            switched_on=bool(getattr(settings, "balanced_moe_experts", False)),
            hot_experts=getattr(settings, "balanced_moe_hot_expert_num", None),
            matmul_rate=getattr(settings, "balanced_moe_matmul_rate", None),
            link_rate=getattr(settings, "balanced_moe_link_rate", None),
            follows_pieces=bool(getattr(settings, "moe_fb_overlap", False)),
        )


def wanted(settings: Any) -> bool:
    """Return whether the flag or any of its options is set; options without the flag are an error."""
    options = Options.of(settings)
    return options.switched_on or options != Options(False, None, None, None)


_FLAG = "--balanced-moe-experts"
_REFUSED = {
    "moe_pad_expert_input_to_capacity": (
        "pads every expert to the same number of rows, so that there is nothing to balance"
    ),
    "moe_latent_size": "has projections between the router and the experts, which moved tokens would miss",
    "moe_apply_probs_on_input": "scales rows before the experts, which moved tokens would miss",
    "delay_wgrad_compute": "computes weight gradients when those of moved experts have returned already",
    "overlap_dispatch_backward_with_experts_wgrad": (
        "computes weight gradients beside the transfer behind which those of moved experts return"
    ),
    "use_megatron_fsdp": "shards the weights that would travel",
    "use_custom_fsdp": "shards the weights that would travel",
}
"""Megatron arguments that are refused when set, with the reason."""


def check_arguments(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem for each job argument that is incompatible with the feature."""
    yield from check_balanced(args, options)
    # A model configuration may hold only the default here; the layer itself is checked when it is built.
    if options.switched_on and argument(args, "transformer_impl") not in (None, "local"):
        yield f"{_FLAG} moves the weights of Megatron's own layers; add --transformer-impl local"


def check_balanced(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem for each argument or configuration field that is incompatible with the feature."""
    if not options.switched_on:
        yield (
            "--balanced-moe-hot-expert-num, --balanced-moe-matmul-rate and --balanced-moe-link-rate have no "
            f"effect without {_FLAG}; add that or omit them"
        )
        return
    yield from _check_options(args, options)
    yield from _check_parallelism(args)
    yield from check_refused(args, _FLAG, _REFUSED)
    if argument(args, "overlap_moe_expert_parallel_comm") and not options.follows_pieces:
        yield (
            f"{_FLAG} cannot be used with --overlap-moe-expert-parallel-comm, which takes the layer apart; "
            "use --moe-fb-overlap in place of that, or omit one of them"
        )
    yield from check_own_products(args, _FLAG)
    yield from refuse_graphs(args, _FLAG, "a graph would keep the plan of one step")


def _check_options(args: Any, options: Options) -> Iterator[str]:
    experts = number_of_experts(args)
    yield from check_experts(args, _FLAG)
    limit = options.hot_experts
    if experts and limit is not None and not 1 <= limit <= experts:
        yield (
            f"--balanced-moe-hot-expert-num {limit}: give at least 1, and at most the {experts} "
            "experts of a layer, or omit it for as many as pay"
        )
    rates = {"matmul": options.matmul_rate, "link": options.link_rate}
    for name, rate in rates.items():
        if rate is not None and not rate > 0:
            yield f"--balanced-moe-{name}-rate {rate}: give a positive rate, or omit it to have it measured"
    if None in rates.values():
        missing = [f"--balanced-moe-{name}-rate" for name, rate in rates.items() if rate is None]
        yield from check_measured(
            args, _FLAG, "the rates that decide which experts move", f"give {' and '.join(missing)}"
        )


def _check_parallelism(args: Any) -> Iterator[str]:
    if argument(args, "expert_model_parallel_size") == 1:
        yield (
            f"{_FLAG}: with --expert-model-parallel-size 1 all experts are on every rank; use at least 2 or "
            f"omit {_FLAG}"
        )
    if (ranks := expert_tensor_ranks(args)) > 1:
        yield (
            f"{_FLAG} moves whole experts, and here each is split over {ranks} ranks; add "
            "--expert-tensor-parallel-size 1"
        )
    dispatcher = argument(args, "moe_token_dispatcher_type")
    if dispatcher not in (None, "alltoall"):
        yield (
            f"{_FLAG} keeps tokens out of the all-to-all, which the {dispatcher} dispatcher does not have; "
            "use --moe-token-dispatcher-type alltoall"
        )


_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_IMPL = "mindspeed_dsa.features.moe.balanced_experts.layer"
_RANGE = ">=0.14,<0.21"
_OUTERMOST = 10
"""Patch priority: the outermost wrappers remove the moved tokens first and send weights last."""

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
            "Most experts of a layer to move in one microbatch; default: as many as pay.",
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
            "gives the dispatcher's steps the layer's experts, and refuses layers without single experts",
            versions=_RANGE,
        ),
        Patch(
            f"{_DISPATCHER}.dispatch_preprocess",
            "wrap",
            f"{_IMPL}:keep_hot_tokens",
            "plans which experts move, and keeps their tokens on this rank",
            params=("hidden_states", "routing_map", "probs"),
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.preprocess",
            "wrap",
            f"{_IMPL}:count_cold_tokens",
            "counts the rows to dispatch without those of moved experts",
            params=("routing_map",),
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.dispatch_postprocess",
            "wrap",
            f"{_IMPL}:send_weights",
            "starts the weights' transfer, which runs while the other experts compute",
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.combine_preprocess",
            "wrap",
            f"{_IMPL}:run_hot_experts",
            "computes the moved experts on this rank's tokens",
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
        Patch(
            f"{_DISPATCHER}.combine_postprocess",
            "wrap",
            f"{_IMPL}:add_hot_outputs",
            "adds the moved experts' outputs to those that the combine returns",
            versions=_RANGE,
            priority=_OUTERMOST,
        ),
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    active=wanted,
    options=Options.of,
    check=check_arguments,
    doc="balanced-moe-experts.md",
)
