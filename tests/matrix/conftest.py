"""Tests that only ``make test-matrix`` runs, in one environment for each Megatron-core release."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from mindspeed_dsa.patches import versions
from tests.matrix.record import Note, Record

QUICK = "!=0.16.*"
"""Releases other than the quick tests' own, on which the same features are tested more closely."""


def pytest_configure(config: pytest.Config) -> None:
    if file := os.environ.get("MATRIX_RECORD"):
        config.pluginmanager.register(Record(Path(file)))


@pytest.fixture
def note(request: pytest.FixtureRequest, pool: Any) -> Note:
    """Recorder of the case's result for the matrix."""
    return Note(request.node.user_properties, pool)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip cases whose ``releases`` mark excludes the installed release."""
    installed = str(versions.of_megatron())
    here = str(Path(__file__).parent)  # a path's own comparison takes seconds for all items
    for item in items:
        if os.path.dirname(item.path) != here:
            continue
        mark = item.get_closest_marker("releases")
        assert mark is not None, f"{item.nodeid} has no mark that says on which releases it runs"
        (wanted,) = mark.args
        if "MATRIX_RECORD" not in os.environ and not mark.kwargs.get("quick"):
            wanted += f",{QUICK}"
        if not SpecifierSet(wanted).contains(installed, prereleases=True):
            reason = f"for megatron-core {wanted} (make test-matrix); {installed} is installed"
            item.add_marker(pytest.mark.skip(reason=reason))
