"""Pipeline schedules: simulated figures, and on two ranks with a slow link what hides their transfers.

That is another microbatch, in pairs of a forward and a backward, or the other half of the same microbatch.
"""

from __future__ import annotations

from importlib import import_module

from benchmarks.registry import Metrics

RATE = "2gbit"


def run(device: str, quick: bool = False, link: str = RATE) -> Metrics:
    """Simulated and measured entries; the link bed connects processes on the host's processor.

    Args:
        device: not used.
        quick: tiny problems.
        link: rate of the link.
    """
    return {
        "link": link,
        "simulated": import_module("benchmarks.pipeline.simulated").entries(),
        **import_module("benchmarks.pipeline.pairs").run(link, quick),
        **import_module("benchmarks.pipeline.halves").run(link, quick),
    }
