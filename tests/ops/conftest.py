from __future__ import annotations

import os

import pytest
import torch

from mindspeed_dsa.ops import checks

# With it cuBLAS adds in a fixed order, without it torch refuses its products under `poisoned_memory`.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialised memory holds NaN, so that reading it shows; nondeterministic operators raise."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def checked_indices():
    before = checks.set_debug_checks(True)
    yield
    checks.set_debug_checks(before)


@pytest.fixture
def operands_that_are_no_numbers(checked_indices):
    """Debug checks refuse them."""
    checks.set_debug_checks(False)
