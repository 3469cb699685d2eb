from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Four worker processes at most, for all cases of the session; see ``pool.py``."""
    with WorkerPool(size=4) as workers:
        yield workers
