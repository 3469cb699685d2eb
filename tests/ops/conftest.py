from __future__ import annotations

import os

import pytest
import torch

from mindspeed_dsa.ops import checks

# Fixed-order sums in cuBLAS. Without it, torch refuses cuBLAS products under `poisoned_memory`.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill uninitialised memory with NaN, so that a read of it shows, and forbid nondeterministic
    operators.
    """
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
    """Switch off the debug checks, which refuse NaN and infinite operands."""
    checks.set_debug_checks(False)


@pytest.fixture
def hopper_kernels(monkeypatch):
    """Choose the kernels for Hopper: on a GPU of that kind, or in an interpreter on the CPU."""
    from tests.ops.triton_backend import DEVICE, hopper

    if not hopper.HAS_GLUON:
        pytest.skip("this Triton release does not compile the kernels for Hopper")
    if DEVICE == "cpu":
        from tests.ops import gluon_on_cpu

        monkeypatch.setattr(hopper, "interpreted", lambda: False)
        monkeypatch.setattr(hopper, "on_grid", gluon_on_cpu.on_grid)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


@pytest.fixture
def hopper_gpu(hopper_kernels):
    """Skip a test whose sizes are those of a GPU."""
    from tests.ops.triton_backend import DEVICE

    if DEVICE == "cpu":
        pytest.skip("needs a GPU of compute capability 9.0, and TRITON_INTERPRET=0")
