from tests.distributed.conftest import pool

__all__ = ["pool"]
