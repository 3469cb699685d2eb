"""Overlapped halves on the release that is installed: the steps of a MoE layer differ."""

from __future__ import annotations

import pytest

from tests.features.moe.batch_overlap.cases import ALWAYS, MEASURED
from tests.matrix.test_alltoall_overlap import RUNS
from tests.support import moe


@pytest.mark.parametrize("switch", [ALWAYS, MEASURED], ids=["cut", "measured"])
def test_layer_beside_stock(pool, switch):
    for rank in pool.run("tests.matrix.moe_cases:overlapped", 2, runs=RUNS, switch=switch):
        for name, found in rank.items():
            moe.assert_same(found["ours"], found["theirs"])
            expected = 2 * (18 if name == "layer recomputed" else 12)
            assert found["launched"] == expected or switch == MEASURED
