"""Features for two ranks train on tensors of the device, with the CPU platform's losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.npu.feature_cases import LIMIT, require_as_on_a_cpu, rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for files of the cases."""
    return tmp_path_factory.mktemp("layouts")


@pytest.mark.timeout(2 * LIMIT + 100)
@pytest.mark.parametrize(("precision", "name"), rows(2))
def test_a_layout_trains_as_on_cpus(precision: str, name: str, folder: Path) -> None:
    require_as_on_a_cpu(2, precision, name, folder)
