"""What gradient accumulation fusion without Apex does not combine with."""

from __future__ import annotations

from typing import Any

from mindspeed_dsa.features.platform.gradient_fusion.activation import EXTENSION
from mindspeed_dsa.integration.configuration import argument


def check_embedding(args: Any) -> list[str]:
    """What in a job's arguments does not combine with it."""
    if not argument(args, "gradient_accumulation_fusion"):
        return []
    if not argument(args, "defer_embedding_wgrad_compute"):
        return []
    return [
        f"--defer-embedding-wgrad-compute has Megatron import {EXTENSION}, which is not installed; omit it"
    ]
