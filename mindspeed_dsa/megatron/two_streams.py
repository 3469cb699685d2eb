"""Settings of ``--two-streams``, for every kind of feature that has work for a second stream.

Imports neither torch nor Megatron, as declarations read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FLAG = "--two-streams"
LEAST_TOKENS = {"cuda": 8192}
"""By platform the tokens of a rank's microbatch below which waits cost more than they hide.

On CUDA as ``benchmarks gpu`` measured on an H100; elsewhere nobody did, and no microbatch is too small.
"""
_SHARED_ELSEWHERE = ("moe_alltoall_overlap_comm", "moe_batch_overlap")
"""Switches of features that run the shared expert under transfers, on the first stream."""


@dataclass(frozen=True)
class Streams:
    """Choice of what runs on a second stream.

    Attributes:
        second: whether there is one.
        least_tokens: smaller microbatches stay on the first; None: those below the platform's own number.
        pairs: a schedule runs layers in parts, which has work of its own for the second stream.
        shared_elsewhere: flag of the feature that runs the shared expert under transfers; empty: none does.
    """

    second: bool = False
    least_tokens: int | None = None
    pairs: bool = False
    shared_elsewhere: str = ""

    @classmethod
    def of(cls, settings: Any) -> Streams:
        """Read them from resolved settings."""
        elsewhere = [name for name in _SHARED_ELSEWHERE if getattr(settings, name, False)]
        return cls(
            second=bool(getattr(settings, "two_streams", False)),
            least_tokens=getattr(settings, "two_streams_min_tokens", None),
            pairs=bool(getattr(settings, "moe_fb_overlap", False)),
            shared_elsewhere="--" + elsewhere[0].replace("_", "-") if elsewhere else "",
        )


ONE_STREAM = Streams()
