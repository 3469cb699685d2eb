"""Results of measurements and properties of the processor, set through the environment.

``make test-processors`` runs the quick tests with both:

* ``TEST_MEASURED=first`` or ``last``: of the candidates that a feature times, the first or the last one wins.
* ``TEST_MKL=slow`` or ``fast``: CPU operators multiply as on a processor that MKL does not know, or knows.

Processes that tests start themselves, such as example jobs, measure for themselves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

_BASE = 4.0

measures = pytest.mark.skipif("TEST_MEASURED" in os.environ, reason="all measurements have one result here")
"""Mark of tests whose subject is what a measurement finds."""


def take_from_environment() -> None:
    """Replace measurements and processor properties as the environment says; call before features import."""
    if way := os.environ.get("TEST_MEASURED"):
        _measure(way)
    if speed := os.environ.get("TEST_MKL"):
        from mindspeed_dsa.ops.cpu import products

        products._MKL_IS_FAST = {"slow": False, "fast": True}[speed]


def _measure(way: str) -> None:
    from mindspeed_dsa.megatron import measured

    step = {"first": _BASE, "last": 1 / _BASE}[way]

    def slowest(seconds: Mapping[Any, float], group: Any) -> dict[Any, float]:
        """Return times in geometric order, the same on all ranks."""
        return {candidate: step**position for position, candidate in enumerate(seconds)}

    measured.slowest = slowest
