"""What the flags of context parallelism say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.context_parallel.algorithms import Algorithms


@dataclass(frozen=True)
class Options(Algorithms):
    """The rows of a job's context parallel ranks."""


def wanted(settings: Any) -> bool:
    """Whether rows are dealt in blocks."""
    chosen = Options.of(settings)
    return chosen.ranks > 1 and chosen.block_rows > 0
