"""Models without anything to run on a second stream, and what does so already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.megatron.configuration import argument

FLAG = "--two-streams"
_REFUSED = {
    "overlap_moe_expert_parallel_comm": "takes the shared expert's output before it is awaited",
    "cpu_offloading": "brings activations back for one stream",
    "use_megatron_fsdp": "frees a layer's weights when one stream is done",
    "use_custom_fsdp": "frees a layer's weights when one stream is done",
}
"""Arguments of Megatron that are refused when they are set, and why."""


def check_streams(args: Any, _: Any) -> Iterator[str]:
    """What in a job's arguments does not go with a second stream."""
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
    graphs = argument(args, "cuda_graph_impl") or "none"
    if graphs != "none" or argument(args, "enable_cuda_graph") or argument(args, "external_cuda_graph"):
        yield (
            f"{FLAG}: a CUDA graph of a part of the layer would end between the two streams; omit "
            f"--cuda-graph-impl or {FLAG}"
        )
