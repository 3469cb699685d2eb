from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Up to four worker processes for all cases of this folder; most need one or two."""
    with WorkerPool(size=4) as workers:
        yield workers
