"""Settings of ``--two-streams``, for all features that run work on a second stream.

Imports neither torch nor Megatron, because declarations import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FLAG = "--two-streams"
LEAST_TOKENS = {"cuda": 8192}
"""Smallest number of tokens in a rank's microbatch, per platform, for which a second stream pays off.

The CUDA value was measured with ``benchmarks gpu`` on an H100. Other platforms were not measured and have no
minimum.
"""
_SHARED_ELSEWHERE = ("moe_alltoall_overlap_comm", "moe_batch_overlap")
"""Flags of features that run the shared expert during transfers, on the first stream."""


@dataclass(frozen=True)
class Streams:
    """Options that decide which work runs on a second device stream.

    Attributes:
        second: whether a second stream is used.
        least_tokens: smallest microbatch, in tokens, for the second stream; ``None`` means the platform's
            default.
        pairs: whether the forward-backward overlap schedule (``--moe-fb-overlap``) is on; it uses the second
            stream itself.
        shared_elsewhere: flag of a feature that runs the shared expert on the first stream, during expert
            parallel communication; empty if none is on.
    """

    second: bool = False
    least_tokens: int | None = None
    pairs: bool = False
    shared_elsewhere: str = ""

    @classmethod
    def of(cls, settings: Any) -> Streams:
        """Build the options from resolved settings."""
        elsewhere = [name for name in _SHARED_ELSEWHERE if getattr(settings, name, False)]
        return cls(
            second=bool(getattr(settings, "two_streams", False)),
            least_tokens=getattr(settings, "two_streams_min_tokens", None),
            pairs=bool(getattr(settings, "moe_fb_overlap", False)),
            shared_elsewhere="--" + elsewhere[0].replace("_", "-") if elsewhere else "",
        )


ONE_STREAM = Streams()
