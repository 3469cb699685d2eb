"""A MoE layer whose hot experts travel gives what Megatron's gives, with fewer rows dispatched."""

from __future__ import annotations

import pytest

from tests.features.moe.balanced_experts.cases import ALWAYS, NEVER
from tests.support.moe import assert_same

CASES = "tests.features.moe.balanced_experts.cases"
EP2 = {"ep": 2}
SKEWED = [2.0, 1.0, 0.0, -1.0]


def both(pool, ranks, switches=ALWAYS, **arguments):
    """Results of all ranks without and with the feature."""
    run = lambda given: pool.run(f"{CASES}:train", ranks, switches=given, **arguments)  # noqa: E731
    stock, ours = run({}), run(switches)
    for rank, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
        assert_same(mine, theirs)
        assert mine["plans"] == ours[0]["plans"], f"rank {rank} plans otherwise"
    return stock, ours


def test_fewer_rows_are_dispatched(pool):
    """Not by chance: of rank 1's tokens, those of the two experts at rank 0 stay."""
    stock, ours = both(pool, 2, popularity=[SKEWED], **EP2)
    assert ours[0]["plans"][0]
    assert ours[0]["dispatched"] == stock[0]["dispatched"]
    assert ours[1]["dispatched"][0] < stock[1]["dispatched"][0]
    expert = 3 * 32 * 16
    assert ours[0]["sent"] == len(ours[0]["plans"][0]) * expert  # weights
    assert ours[1]["sent"] == ours[0]["sent"]  # their gradients
