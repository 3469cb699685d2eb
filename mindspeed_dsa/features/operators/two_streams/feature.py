"""``--two-streams``: the indexer's projections and the shared expert run beside the rest of their layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.megatron.configuration import argument, uses_cuda_graphs
from mindspeed_dsa.patches.spec import Patch

FLAG = "--two-streams"
_REFUSED = {
    "overlap_moe_expert_parallel_comm": "takes the shared expert's output before it is awaited",
    "cpu_offloading": "brings activations back for one stream",
    "use_megatron_fsdp": "frees a layer's weights when one stream is done",
    "use_custom_fsdp": "frees a layer's weights when one stream is done",
}
"""Arguments of Megatron that are refused when they are set, and why."""


def check_streams(args: Any, options: Any) -> Iterator[str]:
    """Yield what in a job's arguments does not go with a second stream."""
    is_dsa = argument(args, "experimental_attention_variant") == "dsa"
    if not is_dsa and not argument(args, "moe_shared_expert_intermediate_size"):
        yield (
            f"{FLAG}: the model has neither an indexer nor a shared expert; add "
            f"--experimental-attention-variant dsa or --moe-shared-expert-intermediate-size, or omit {FLAG}"
        )
    if argument(args, "moe_shared_expert_overlap"):
        yield (
            f"{FLAG} and --moe-shared-expert-overlap both run the shared expert on a stream of its own; omit "
            "one of them"
        )
    for name, why in _REFUSED.items():
        if argument(args, name):
            flag = {"cpu_offloading": "cpu_offloading_num_layers"}.get(name, name).replace("_", "-")
            yield f"{FLAG} cannot be used with --{flag}, which {why}; omit one of them"
    if uses_cuda_graphs(args):
        yield (
            f"{FLAG}: a CUDA graph of a part of the layer would end between the two streams; omit "
            f"--cuda-graph-impl or {FLAG}"
        )


_IMPL = "mindspeed_dsa.features.operators.two_streams.second_stream"
_DSA = "megatron.core.transformer.experimental_attention_variant"
_INDEXER = f"{_DSA}.dsa:DSAIndexer"
_WHY_BESIDE = "the indexer needs nothing but products of the hidden states, which attention reads here first"
_WHY_INDEXER = "the indexer's products of the hidden states are there already"
_MOVES_SHARED = "both move the shared expert, the other feature under the transfers; omit one of them"

FEATURE = Feature(
    name="two-streams",
    summary="Runs the indexer's projections beside the main attention's, and the shared expert beside the "
    "router and the experts, on a second stream.",
    flags=(
        Flag(
            "--two-streams",
            "Run the indexer's projections of the hidden states beside the main attention's "
            "down-projections, and the shared expert beside the router, on a second stream.",
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
            params=("x",),
            versions=">=0.16,<0.17",
        ),
        Patch(
            f"{_INDEXER}.forward_before_topk",
            "wrap",
            f"{_IMPL}:take_projections",
            _WHY_INDEXER,
            params=("x",),
            versions=">=0.17,<0.21",
        ),
        Patch(
            "megatron.core.transformer.moe.moe_layer:MoELayer.shared_experts_compute",
            "wrap",
            f"{_IMPL}:compute_beside",
            "nobody needs the shared expert's output before the layer's last step",
            params=("hidden_states",),
            versions=">=0.16,<0.21",
            priority=-100,  # inside of whoever decides when the shared expert runs
        ),
    ),
    requires=Requires(versions={"megatron-core": ">=0.16,<0.21"}),
    conflicts=(
        Conflict("moe-alltoall-overlap-comm", _MOVES_SHARED),
        Conflict("moe-batch-overlap", _MOVES_SHARED),
        Conflict("moe-fb-overlap", _MOVES_SHARED),
        Conflict("swap-attention", "swapped tensors are brought back for one stream; omit one of them"),
        Conflict("fsdp2", "FSDP2 frees a layer's weights when one stream is done; omit one of them"),
    ),
    check=check_streams,
    on_finalize=f"{_IMPL}:say_how_many",
    doc="two-streams.md",
)
