from __future__ import annotations

import pytest

from tests.distributed.parity import Lab
from tests.support.pool import WorkerPool


@pytest.fixture(scope="session")
def lab(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Return a lab that trains layouts for five steps from common initial weights."""
    return Lab(pool, tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="session")
def ten_steps(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Return a lab that trains ten steps."""
    return Lab(pool, tmp_path_factory.mktemp("ten-steps"), steps=10)
