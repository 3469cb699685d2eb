"""An all-to-all in two halves moves what Megatron's moves, with room for other work in both directions."""

from __future__ import annotations

import pytest

ROWS = {2: [[3, 2], [4, 1]], 3: [[0, 2, 1], [0, 0, 0], [5, 0, 1]]}


@pytest.mark.parametrize("ranks", ROWS)
def test_values_gradients_and_order(pool, ranks):
    """Also of a rank that sends nothing, and of pairs that exchange nothing."""
    for found in pool.run("tests.parallel.all_to_all_cases:beside_megatrons", ranks, rows=ROWS[ranks]):
        for ours, theirs in zip(found["ours"], found["theirs"], strict=True):
            assert ours.equal(theirs)
        assert found["forward"] == ["launch", "launch", "wait", "wait"]
        assert found["backward"] == ["launch", "launch", "meanwhile", "wait", "wait"]
        assert "waited for already" in found["again"]
