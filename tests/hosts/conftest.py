"""Time limits of tests that start jobs: a job of a host takes minutes where cores are shared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = f"{Path(__file__).parent}{os.sep}"  # a path's own comparison takes seconds for all items


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the time limit of all tests of hosts that have none of their own."""
    for item in items:
        if str(item.path).startswith(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(3600))
