"""What the flags of context parallelism say."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_dsa.context_parallel.algorithms import Algorithms


@dataclass(frozen=True)
class Options(Algorithms):
    """The algorithms of a job's layers."""
