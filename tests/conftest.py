"""No test leaves a patch behind."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _no_patches_left():
    """Undo the session's patches after each test, whatever the test did."""
    yield
    session = sys.modules.get("mindspeed_dsa.session")
    if session is not None and session.current() is not None:
        session.disable()
