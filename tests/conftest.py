"""One pool of workers; tests are kept apart; Triton's kernels can be interpreted."""

from __future__ import annotations

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
    """Import Triton before anybody else does: its own library is interpretable or not from then on.

    Only during the import is the variable set: Megatron's kernels and processes started by tests see what
    the user set. With TRITON_INTERPRET=0 kernels are compiled, and their tests need a GPU.
    """
    before = os.environ.get("TRITON_INTERPRET")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        import triton
        import triton.experimental.gluon  # noqa: F401  what the first launch imports

        from tests.support.interpreter import speed_up

        if os.environ["TRITON_INTERPRET"] == "1":
            # The compiler's own values are not the interpreter's.
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
    """Do not look for garbage while test modules are imported: there is none in what grows that much."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Put torch and the rest out of the garbage collector's sight: tests go through all objects often."""
    from tests.support import third_party

    third_party.out_of_sight()


def pytest_unconfigure() -> None:
    """Triton's library complains at the end of what the collector does not see."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Worker processes that play the ranks of a job, for all tests; see ``support/pool.py``."""
    from tests.support.pool import WorkerPool

    with WorkerPool() as workers:
        yield workers


@pytest.fixture(scope="session", name="sources")
def _sources() -> Sources:
    """Every module of the package, parsed once: that takes seconds."""
    import mindspeed_dsa
    from tests.support.import_graph import Sources

    return Sources(Path(mindspeed_dsa.__file__).parent, mindspeed_dsa.__name__)


@pytest.fixture(autouse=True)
def _apart():
    """Give each test the same random numbers, and nothing that an earlier one has switched on."""
    random.seed(0)
    for name, seed in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if (module := sys.modules.get(name)) is not None:
            attrgetter(seed)(module)(0)
    yield
    session = sys.modules.get("mindspeed_dsa.session")
    if session is not None and session.current() is not None:
        session.disable()
    # What was chosen for a device that the test pretends to have.
    backend = sys.modules.get("mindspeed_dsa.ops.backend")
    if backend is not None:
        backend.choose.cache_clear()
