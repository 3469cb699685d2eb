"""Selections of pools with the Triton kernels."""

from __future__ import annotations

from tests.ops.test_selections import check_pools
from tests.ops.triton_backend import DEVICE


def test_pools_are_selected_by_their_best_key():
    check_pools("triton", DEVICE)
