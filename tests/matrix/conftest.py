"""Tests that run under `make test-matrix` only: one environment for each release of Megatron-core."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

WITHOUT_DSA = ">=0.12.1,<0.16"
RELEASES = {
    "test_kernel_backend.py": ">=0.19,<0.20",
    "test_alltoall_overlap.py": ">=0.13,!=0.16.*,<0.20",
    "test_batch_overlap.py": ">=0.14,!=0.16.*,<0.20",
    "test_fb_overlap.py": ">=0.14,!=0.16.*,<0.20",
    "test_permute_fusion.py": ">=0.12.1,!=0.16.*,<0.20",
    "test_grouped_experts.py": ">=0.12.1,!=0.16.*,<0.20",
    "test_balanced_experts.py": ">=0.14,!=0.16.*,<0.20",
    "test_memory.py": ">=0.12.1,!=0.16.*,<0.20",
    "test_local_modules.py": ">=0.12.1,<0.20",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    installed = metadata.version("megatron-core")
    for item in items:
        if Path(item.path).parent != Path(__file__).parent:
            continue
        wanted = RELEASES.get(Path(item.path).name, WITHOUT_DSA)
        if not SpecifierSet(wanted).contains(installed, prereleases=True):
            reason = f"for megatron-core {wanted} (make test-matrix); {installed} is installed"
            item.add_marker(pytest.mark.skip(reason=reason))
