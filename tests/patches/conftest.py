from __future__ import annotations

import gc

import pytest

from tests.patches.house import House


@pytest.fixture
def house(tmp_path, monkeypatch):
    """Make the stub packages importable; undo all patches and forget the modules afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    built = House(tmp_path)
    yield built
    built.close()


@pytest.fixture(autouse=True, scope="module")
def _small_heap():
    """Exclude other tests' objects from garbage collection, because finalize visits every tracked object."""
    gc.collect()
    gc.freeze()
