"""Emulated results of measurements and processor properties, set through the environment.

``make test-processors`` runs the quick tests with both:

* ``TEST_MEASURED=first`` or ``last``: the first or the last of the candidates that a feature times wins.
* ``TEST_MKL=slow`` or ``fast``: CPU operators multiply as on a processor that MKL does not know, or knows.

Processes that tests start themselves, for example example jobs, make real measurements.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

_BASE = 4.0

measures = pytest.mark.skipif("TEST_MEASURED" in os.environ, reason="all measurements have one result here")
"""Mark of tests that depend on real measurements."""


def take_from_environment() -> None:
    """Replace measurements and processor properties by the environment's; call before features import."""
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
