"""The checkpoint without output under Megatron's name for it."""

from __future__ import annotations

from typing import Any

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.memory import checkpoint
from mindspeed_dsa.features.memory.recompute_outputs.feature import Options


def checkpoint_without_output(context: Context[Options]) -> type[checkpoint.CheckpointWithoutOutput]:
    """Make the class that Megatron's modules create with its own arguments."""

    class CheckpointWithoutOutput(checkpoint.CheckpointWithoutOutput):
        def __init__(self, fp8: Any = None, retain_input_tensors: bool = False) -> None:
            # Memory that outputs share with inputs is never freed, which is all that the flag asks for.
            super().__init__(context.megatron, context.options.verify, fp8)

    return CheckpointWithoutOutput
