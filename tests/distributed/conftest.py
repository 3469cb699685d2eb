from __future__ import annotations

import pytest

from tests.distributed.parity import Lab
from tests.support.pool import WorkerPool


@pytest.fixture(scope="session")
def lab(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Layouts from common initial weights; see ``parity.py``."""
    return Lab(pool, tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="session")
def ten_steps(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The same with twice as many steps."""
    return Lab(pool, tmp_path_factory.mktemp("ten-steps"), steps=10)
