"""A selection that contradicts itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.operators.selection import check_selection


def check_mask_arithmetic(args: Any, _: Any) -> Iterator[str]:
    """What in a job's arguments does not go with mask arithmetic."""
    yield from check_selection(args, "mask-arithmetic")
