"""Tests that run under `make test-matrix` only: one environment for each release of Megatron-core."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from mindspeed_dsa.patches import versions
from tests.matrix.record import Note, Record

WITHOUT_DSA = ">=0.12.1,<0.16"
QUICK = "!=0.16.*"
"""What the quick tests have: they run the same features there, more closely."""
RELEASES = {
    "test_kernel_backend.py": ">=0.19",
    "test_alltoall_overlap.py": ">=0.13",
    "test_batch_overlap.py": ">=0.14",
    "test_fb_overlap.py": ">=0.14",
    "test_permute_fusion.py": ">=0.12.1",
    "test_grouped_experts.py": ">=0.12.1",
    "test_balanced_experts.py": ">=0.14",
    "test_memory.py": ">=0.12.1",
    "test_features.py": ">=0.12.1",
    "test_pretrain_gpt.py": ">=0.12.1",
    "test_local_modules.py": ">=0.12.1",
}


def pytest_configure(config: pytest.Config) -> None:
    if file := os.environ.get("MATRIX_RECORD"):
        config.pluginmanager.register(Record(Path(file)))


@pytest.fixture
def note(request: pytest.FixtureRequest, pool: Any) -> Note:
    """What a case says about a feature."""
    return Note(request.node.user_properties, pool)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    installed = str(versions.of_megatron())
    for item in items:
        if Path(item.path).parent != Path(__file__).parent:
            continue
        name = Path(item.path).name
        wanted = RELEASES.get(name, WITHOUT_DSA)
        if "MATRIX_RECORD" not in os.environ and name != "test_local_modules.py":
            wanted += f",{QUICK}"
        if not SpecifierSet(wanted).contains(installed, prereleases=True):
            reason = f"for megatron-core {wanted} (make test-matrix); {installed} is installed"
            item.add_marker(pytest.mark.skip(reason=reason))
