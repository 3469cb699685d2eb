from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Two worker processes for all cases of this folder."""
    with WorkerPool(size=2) as workers:
        yield workers
