from __future__ import annotations

from tests.distributed.conftest import pool  # noqa: F401  one pool for the whole test session
