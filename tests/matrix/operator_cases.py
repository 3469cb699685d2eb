"""A step of the tiny model with fused operators, on any release; runs in the pool's workers."""

from __future__ import annotations

from typing import Any

from tests.matrix.model import EXPERTS, one_step
from tests.support import memory_events


def step(fused: bool, **layout: int) -> dict[str, Any]:
    """Losses, gradients, and what was counted."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    switches = {"fused_operators": ["all"]} if fused else {}
    # Before 0.13 it is a matter of the specification alone.
    local = "transformer_impl" in MLATransformerConfig.__dataclass_fields__
    overrides = {**EXPERTS, **({"transformer_impl": "local"} if local else {})}
    with memory_events.counted() as counts:
        result = one_step(switches, overrides, num_microbatches=2, **layout)
    return {**result, "counts": dict(counts)}
