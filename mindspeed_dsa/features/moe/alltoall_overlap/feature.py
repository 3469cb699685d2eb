"""Overlap of the MoE all-to-alls with the shared expert and the experts' weight gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from mindspeed_dsa import log
from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.megatron.configuration import argument, builds_by_engine
from mindspeed_dsa.megatron.expert_parallel import (
    ROWS,
    check_all_to_all,
    check_experts,
    check_refused,
    number_of_experts,
    run_shared_expert,
)
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.patches.spec import Patch

FLAG = "--moe-alltoall-overlap-comm"


def check_overlap(args: Any, options: Any = None) -> Iterator[str]:
    """Yield a problem for each setting with which nothing overlaps, or Megatron overlaps already."""
    if not number_of_experts(args):
        yield from check_experts(args, FLAG)
        return
    yield from check_all_to_all(args, FLAG, "overlap")
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
    yield from refuse_graphs(args, FLAG, "a graph holds each transfer at a fixed place")
    why = "takes weight gradients before those under the transfers are there"
    yield from check_refused(args, FLAG, dict.fromkeys(("use_megatron_fsdp", "use_custom_fsdp"), why))
    if builds_by_engine(args) and not argument(args, "moe_shared_expert_intermediate_size"):
        yield (
            f"{FLAG}: the model has no shared expert, and Transformer Engine's experts keep their weight "
            "gradients, so that nothing is left to hide transfers; use --moe-batch-overlap or "
            "--transformer-impl local, or omit it"
        )
    elif argument(args, "transformer_impl") == "transformer_engine":
        log.get("moe-alltoall-overlap-comm").info(
            "weight gradients of Transformer Engine's experts stay where they are; the shared expert alone "
            "runs under the transfers",
            once=True,
        )


_LAYER = "megatron.core.transformer.moe.moe_layer:MoELayer"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_IMPL = "mindspeed_dsa.features.moe.alltoall_overlap.layer"

FEATURE = Feature(
    name="moe-alltoall-overlap-comm",
    summary="Runs the shared expert, and in backward the experts' weight gradients, while tokens travel.",
    overlaps="all-to-alls of experts",
    flags=(
        Flag(
            "--moe-alltoall-overlap-comm",
            "Hide dispatch and combine of MoE layers behind the shared expert and the experts' weight "
            "gradients of the same microbatch.",
        ),
    ),
    patches=(
        Patch(
            f"{_LAYER}.shared_experts_compute",
            "wrap",
            f"{_IMPL}:postpone_shared_experts",
            "postpones the shared expert until the transfers are under way",
            params=("hidden_states",),
            versions=">=0.15,<0.21",
        ),
        Patch(
            f"{_LAYER}.dispatch",
            "wrap",
            f"{_IMPL}:expect_transfers",
            "begins the overlap in releases that have no step for the shared expert",
            params=("hidden_states", "probs"),
            versions=">=0.13,<0.15",
        ),
        Patch(
            f"{_DISPATCHER}.token_dispatch",
            "wrap",
            f"{_IMPL}:launch_dispatch",
            "starts the dispatch's all-to-alls without waiting for them",
        ),
        Patch(
            f"{_LAYER}.routed_experts_compute",
            "wrap",
            f"{_IMPL}:overlap_experts",
            "runs the routed experts between the shared expert's halves, with deferred weight gradients",
            params=("hidden_states", "probs"),
            versions=">=0.15,<0.21",
        ),
        Patch(
            f"{_LAYER}.experts_compute",
            "wrap",
            f"{_IMPL}:overlap_all_experts",
            "runs the routed experts between the shared expert's halves, where one step computes both",
            params=("hidden_states", "probs", "residual"),
            versions=">=0.13,<0.15",
        ),
        Patch(
            f"{_DISPATCHER}.token_combine",
            "wrap",
            f"{_IMPL}:wait_for_combine",
            "waits for the combine, which was started before the shared expert's second half",
            params=("hidden_states",),
        ),
        *ROWS,
    ),
    requires=Requires(versions={"megatron-core": ">=0.13,<0.21"}),
    rewrite=partial(run_shared_expert, flag=FLAG),
    check=check_overlap,
    doc="moe-alltoall-overlap-comm.md",
)
