"""What does not combine with overlapped all-to-alls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa import log
from mindspeed_dsa.megatron.configuration import argument

FLAG = "--moe-alltoall-overlap-comm"


def check_overlap(args: Any, options: Any = None) -> Iterator[str]:
    """What in arguments, or in a model's configuration, leaves nothing to overlap or overlaps it already."""
    if argument(args, "num_moe_experts") is None and not argument(args, "num_experts"):
        yield f"{FLAG}: the model has no experts; add --num-experts or omit {FLAG}"
        return
    if argument(args, "expert_model_parallel_size") == 1:
        yield (
            f"{FLAG}: with --expert-model-parallel-size 1 no token leaves its rank; use at least 2 or omit "
            f"{FLAG}"
        )
    dispatcher = argument(args, "moe_token_dispatcher_type")
    if dispatcher not in (None, "alltoall"):
        yield (
            f"{FLAG}: --moe-token-dispatcher-type {dispatcher} has no all-to-all of its own to overlap; use "
            f"--moe-token-dispatcher-type alltoall or omit {FLAG}"
        )
    if argument(args, "moe_shared_expert_overlap"):
        yield (
            f"{FLAG} and --moe-shared-expert-overlap both put the shared expert under the transfers; omit "
            "--moe-shared-expert-overlap"
        )
    if argument(args, "overlap_moe_expert_parallel_comm"):
        yield (
            f"{FLAG} and --overlap-moe-expert-parallel-comm both hide the same transfers, the latter behind "
            "another microbatch; omit one of them"
        )
    if argument(args, "delay_wgrad_compute") or argument(
        args, "overlap_dispatch_backward_with_experts_wgrad"
    ):
        yield (
            f"{FLAG} computes the experts' weight gradients under the transfers itself; omit "
            "--delay-wgrad-compute and --overlap-dispatch-backward-with-experts-wgrad"
        )
    graphs = argument(args, "cuda_graph_impl") or "none"
    if graphs != "none" or argument(args, "enable_cuda_graph") or argument(args, "external_cuda_graph"):
        yield (
            f"{FLAG} cannot be used with CUDA graphs, which hold each transfer at a fixed place; omit "
            f"--cuda-graph-impl or {FLAG}"
        )
    if argument(args, "transformer_impl") == "transformer_engine":
        log.get("moe-alltoall-overlap-comm").info(
            "weight gradients of Transformer Engine's experts stay where they are; the shared expert alone "
            "runs under the transfers",
            once=True,
        )
