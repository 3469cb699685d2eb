"""Cases that quick runs do without on one release only."""

from __future__ import annotations

import os

import pytest

FULL_HERE = pytest.mark.skipif(False, reason="") if "MATRIX_RECORD" in os.environ else pytest.mark.full
"""Mark of a case that ``make test-matrix`` runs on other releases, and only ``make test-full`` on the quick
tests' own. In the matrix it does nothing.
"""
