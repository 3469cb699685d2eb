"""Megatron's own linear layers use the ports that a feature has opened for their weights.

Imports neither torch nor the implementation, as ``feature.py`` of every feature that wants it does.
"""

from __future__ import annotations

from mindspeed_dsa.patches.spec import Patch

ROW = Patch(
    "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
    "wrap",
    "mindspeed_dsa.megatron.ported_linear:use_port",
    "the weight's gradient is computed where a port was opened for it",
    params=(
        "input",
        "weight",
        "bias",
        "gradient_accumulation_fusion",
        "allreduce_dgrad",
        "sequence_parallel",
        "grad_output_buffer",
    ),
    priority=1,
)
"""Outside of chunked communication, which has nothing to do where a port is served."""
