"""``--two-streams``: runs the indexer's projections and the shared expert on a second stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.megatron import dsa
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.expert_parallel import check_refused
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.megatron.two_streams import FLAG, LEAST_TOKENS, Streams
from mindspeed_dsa.patches.spec import Patch

_REFUSED = {
    "cpu_offloading": "brings activations back for one stream",
    "fine_grained_activation_offloading": "brings activations back for one stream",
    "use_megatron_fsdp": "frees a layer's weights when one stream is done",
    "use_custom_fsdp": "frees a layer's weights when one stream is done",
}
"""Dict from refused argument of Megatron to the reason."""


@dataclass(frozen=True)
class Options:
    """Options of ``--two-streams``.

    Attributes:
        streams: settings shared with other features.
        dsa: options of DSA's operators, which determine which code runs the indexer's projections.
        overlaps_tp: whether linear layers overlap tensor parallel communication. They then have communication
            buffers that only one stream may use.
    """

    streams: Streams
    dsa: dsa.Options
    overlaps_tp: bool = False

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Read the options from resolved settings."""
        names = ("use_ascend_coc", "coc_fused_kernel", "use_ascend_mc2")
        overlaps = any(getattr(settings, name, False) for name in names)
        chunks = getattr(settings, "coc_parallel_num", None) or 1
        return cls(Streams.of(settings), dsa.Options.of(settings), overlaps or chunks > 1)


def check_streams(args: Any, options: Options) -> Iterator[str]:
    """Yield problems with arguments that do not work together with a second stream."""
    streams = options.streams
    yield from _check_work(args, streams)
    if streams.least_tokens is not None and streams.least_tokens < 0:
        yield f"--two-streams-min-tokens {streams.least_tokens}: use a number of tokens, at least 0"
    if argument(args, "overlap_moe_expert_parallel_comm") and not streams.pairs:
        yield (
            f"{FLAG} cannot be used with --overlap-moe-expert-parallel-comm, which takes the shared expert's "
            "output before it is awaited; use --moe-fb-overlap, or omit one of them"
        )
    yield from check_refused(args, FLAG, _REFUSED)
    yield from refuse_graphs(args, FLAG, "a graph of a part of the layer would end between the two streams")


def _check_work(args: Any, streams: Streams) -> Iterator[str]:
    """Yield a problem if the model has no work for the second stream."""
    if dsa.uses_dsa(args) or streams.pairs:
        return
    if not argument(args, "moe_shared_expert_intermediate_size"):
        yield (
            f"{FLAG}: the model has neither an indexer nor a shared expert; add "
            f"--experimental-attention-variant dsa or --moe-shared-expert-intermediate-size, or omit {FLAG}"
        )
        return
    elsewhere = streams.shared_elsewhere
    if argument(args, "moe_shared_expert_overlap"):
        elsewhere = "--moe-shared-expert-overlap"
    if elsewhere:
        yield (
            f"{FLAG}: {elsewhere} runs the shared expert elsewhere, and the model has no indexer, so nothing "
            f"is left for a second stream; omit {FLAG}"
        )


_IMPL = "mindspeed_dsa.features.operators.two_streams.layer"
_DSA = "megatron.core.transformer.experimental_attention_variant"
_INDEXER = f"{_DSA}.dsa:DSAIndexer"
_WHY_BESIDE = "the indexer needs nothing but products of the hidden states, which attention reads here first"
_WHY_INDEXER = "the indexer's products of the hidden states are there already"

FEATURE = Feature(
    name="two-streams",
    summary="Runs the indexer's projections beside the main attention's, and the shared expert beside the "
    "router and the experts, on a second stream.",
    flags=(
        Flag(
            "--two-streams",
            "Run the indexer's projections of the hidden states beside the main attention's "
            "down-projections, and the shared expert beside the router, on a second stream; with "
            "--moe-fb-overlap also permutation and unpermutation, beside the other direction's matmuls.",
        ),
        Flag(
            "--two-streams-min-tokens",
            "Leave microbatches on the first stream that have fewer tokens on a rank; default: "
            f"{LEAST_TOKENS['cuda']} on a GPU, 0 elsewhere.",
            kind="value",
            type=int,
            metavar="N",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_IMPL}:project_beside",
            _WHY_BESIDE,
            params=("hidden_states", "inference_context"),
            versions=">=0.16,<0.19",
        ),
        Patch(
            f"{_DSA}.absorbed_mla:AbsorbedMLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_IMPL}:project_beside",
            _WHY_BESIDE,
            params=("hidden_states", "inference_context"),
            versions=">=0.19,<0.21",
        ),
        Patch(
            f"{_INDEXER}.forward_with_scores",
            "wrap",
            f"{_IMPL}:take_projections",
            _WHY_INDEXER,
            params=("x", "qr"),
            versions=">=0.16,<0.17",
        ),
        Patch(
            f"{_INDEXER}.forward_before_topk",
            "wrap",
            f"{_IMPL}:take_projections",
            _WHY_INDEXER,
            params=("x", "qr"),
            versions=">=0.17,<0.21",
        ),
        Patch(
            "megatron.core.transformer.moe.moe_layer:MoELayer.shared_experts_compute",
            "wrap",
            f"{_IMPL}:compute_beside",
            "nobody needs the shared expert's output before the layer's last step",
            params=("hidden_states",),
            versions=">=0.16,<0.21",
            priority=-100,  # inside of wrappers that decide when the shared expert runs
        ),
    ),
    requires=Requires(versions={"megatron-core": ">=0.16,<0.21"}),
    options=Options.of,
    check=check_streams,
    on_finalize=f"{_IMPL}:say_how_many",
    doc="two-streams.md",
)
