"""Pipeline messages over gloo that arrive intact, in order and without loss."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, on_platform
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.settings import PLATFORM

_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_IMPL = "mindspeed_dsa.features.platform.p2p_ordering.transfers"
_TENSORS = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
_PARAMS = (*_TENSORS, "group", "prev_pipeline_rank", "next_pipeline_rank")


FEATURE = Feature(
    name="cpu-p2p-ordering",
    summary="Makes pipeline P2P over gloo correct: sends keep their data, messages are tagged by direction.",
    flags=(PLATFORM,),
    patches=(
        Patch(
            f"{_P2P}:_p2p_ops",
            "wrap",
            f"{_IMPL}:exchange_overlapped",
            "overlapped sends keep their data and their handles until they are complete",
            params=_PARAMS,
        ),
        Patch(
            f"{_P2P}:_batched_p2p_ops",
            "wrap",
            f"{_IMPL}:exchange_batched",
            "activations and gradients between the same two ranks cannot be mixed up",
            params=_PARAMS,
        ),
        Patch(
            "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
            "wrap",
            f"{_IMPL}:complete_sends",
            "a send whose handle the schedule dropped is completed before the schedule returns",
        ),
    ),
    active=on_platform("cpu"),
    doc="cpu-platform",
    platform_support=True,
)
