from __future__ import annotations

import atexit
import functools

import pytest

from tests.distributed.parity import Lab
from tests.distributed.pool import WorkerPool


@functools.cache
def _shared_pool() -> WorkerPool:
    """One pool even if several folders import the fixture, each of which pytest takes for another one."""
    workers = WorkerPool(size=4)
    atexit.register(workers.close)
    return workers


@pytest.fixture(scope="session")
def pool() -> WorkerPool:
    """Four worker processes at most, for all cases of the session; see ``pool.py``."""
    return _shared_pool()


@pytest.fixture(scope="session")
def lab(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Layouts from common initial weights; see ``parity.py``."""
    return Lab(pool, tmp_path_factory.mktemp("parity"))
