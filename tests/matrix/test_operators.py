"""Fused operators on any release: the same step as without."""

from __future__ import annotations

import pytest

from tests.support.memory_events import FUSED_OPERATORS
from tests.support.model import assert_same_gradients


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_is_the_same(pool, ranks):
    case, layout = "tests.matrix.operator_cases:step", {"tp": ranks}
    stock = pool.run(case, ranks, fused=False, **layout)
    fused = pool.run(case, ranks, fused=True, **layout)
    for before, after in zip(stock, fused, strict=True):
        losses = [[float(loss) for loss in side["losses"]] for side in (before, after)]
        assert losses[1] == pytest.approx(losses[0], rel=2e-5)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=2e-4)
        for operator, event in FUSED_OPERATORS.items():
            assert event in after["counts"], operator
            assert event not in before["counts"], operator
