"""Sizes as people read them, down to those that are nothing in GB."""

from __future__ import annotations

import pytest

from mindspeed_dsa.runs.files import amount


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.00 kB"),
        (1_234, "1.23 kB"),
        (999_999, "1000.00 kB"),
        (4_200_000, "4.20 MB"),
        (10**9, "1.00 GB"),
        (1_342_000_000_000, "1342.00 GB"),
    ],
)
def test_amounts(nbytes: int, text: str) -> None:
    assert amount(nbytes) == text
