"""Recomputation of a chunk where its pipeline rank would wait for a gradient."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.features.pipeline.recompute_ahead.options import Options
from mindspeed_dsa.features.pipeline.recompute_ahead.validation import (
    check_recompute_ahead,
    recompute_ahead_wanted,
)
from mindspeed_dsa.patches.spec import Patch

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"
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
        Patch(
            f"{_SCHEDULES}:get_forward_backward_func",
            "wrap",
            f"{_HERE}:follow_steps",
            "the order of backwards is known when a step begins",
        ),
        Patch(
            f"{_SCHEDULES}:forward_step",
            "wrap",
            f"{_HERE}:follow_forwards",
            "what is checkpointed belongs to this chunk and microbatch",
        ),
        Patch(
            f"{_SCHEDULES}:backward_step",
            "wrap",
            f"{_HERE}:follow_backwards",
            "from here on the next backward is another",
            params=("output_tensor",),
        ),
        Patch(
            "megatron.core.tensor_parallel.random:checkpoint",
            "wrap",
            f"{_HERE}:checkpoint_ahead",
            "a checkpointed segment can be recomputed before its backward",
            params=("function", "distribute_saved_activations"),
        ),
        Patch(
            f"{_P2P}:_p2p_ops",
            "wrap",
            f"{_HERE}:recompute_before_waiting",
            "the wait for a gradient of the overlapped schedule",
            params=("tensor_recv_next",),
        ),
        Patch(
            f"{_P2P}:_batched_p2p_ops",
            "wrap",
            f"{_HERE}:recompute_before_waiting",
            "the wait for a gradient of batched transfers",
            params=("tensor_recv_next",),
        ),
    ),
    active=recompute_ahead_wanted,
    options=Options.of,
    validate=check_recompute_ahead,
    doc="recompute-ahead.md",
)
