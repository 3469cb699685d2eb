from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops import checks


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
