from __future__ import annotations

import gc

import pytest

from tests.patches.house import House


@pytest.fixture
def house(tmp_path, monkeypatch):
    """The stub packages, importable; patches undone and modules forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    built = House(tmp_path)
    yield built
    built.close()


@pytest.fixture(autouse=True, scope="module")
def _small_heap():
    """Hide what other tests have left in memory: finalize visits every object there is."""
    gc.collect()
    gc.freeze()
