from __future__ import annotations

from collections.abc import Iterator

import pytest

import mindspeed_dsa
from tests.distributed.conftest import pool

__all__ = ["pool"]


@pytest.fixture
def redirected() -> Iterator[None]:
    with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
        yield
