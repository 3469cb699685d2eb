"""Pipeline schedules: simulated figures, and paired forwards and backwards on two ranks with a slow link."""

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
    }
