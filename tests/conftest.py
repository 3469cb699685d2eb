"""Shared fixtures: a pool of workers, isolation of tests, and interpreted Triton kernels."""

from __future__ import annotations

import atexit
import gc
import os
import random
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.import_graph import Sources
    from tests.support.pool import WorkerPool


def _import_triton() -> None:
    """Import Triton first, as the import decides whether Triton's own library is interpretable.

    The variable is set only during the import: Megatron's kernels and processes started by tests see the
    user's value. With TRITON_INTERPRET=0 kernels are compiled, and their tests need a GPU.
    """
    before = os.environ.get("TRITON_INTERPRET")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        import triton
        import triton.experimental.gluon  # noqa: F401  what the first launch imports

        from tests.support.interpreter import speed_up

        if os.environ["TRITON_INTERPRET"] == "1":
            # The compiler's own values differ from the interpreter's.
            speed_up()
    except ModuleNotFoundError:
        pass
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]


_import_triton()

from tests.support import sources, stand_in  # noqa: E402  after Triton, like everything else

sources.parse_once()
stand_in.take_from_environment()

pytest_plugins = ["tests.support.figures"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable garbage collection while test modules are imported, as imports create little garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Hide torch and other imports from the garbage collector, which tests run often."""
    from tests.support import third_party

    third_party.out_of_sight()


# Triton's library complains at exit about objects that the collector skips. Not earlier: pytest ends with ten
# collections, which would take seconds.
atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Yield worker processes that act as a job's ranks in all tests; see ``support/pool.py``."""
    from tests.support.pool import WorkerPool

    with WorkerPool() as workers:
        yield workers


@pytest.fixture(scope="session", name="sources")
def _sources() -> Sources:
    """Return every module of the package, parsed only once, as that takes seconds."""
    import mindspeed_dsa
    from tests.support.import_graph import Sources

    return Sources(Path(mindspeed_dsa.__file__).parent, mindspeed_dsa.__name__)


@pytest.fixture(autouse=True)
def _apart():
    """Give each test the same random numbers, and disable features that an earlier test enabled."""
    random.seed(0)
    for name, seed in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if (module := sys.modules.get(name)) is not None:
            attrgetter(seed)(module)(0)
    yield
    session = sys.modules.get("mindspeed_dsa.session")
    if session is not None and session.current() is not None:
        session.disable()
    # Forget choices made for a device that the test simulates.
    backend = sys.modules.get("mindspeed_dsa.ops.backend")
    if backend is not None:
        backend.choose.cache_clear()
