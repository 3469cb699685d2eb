from __future__ import annotations

from collections.abc import Iterator

import pytest

import mindspeed_dsa


@pytest.fixture
def redirected() -> Iterator[None]:
    with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
        yield
