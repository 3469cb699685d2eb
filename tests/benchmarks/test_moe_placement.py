"""The bar of placed experts."""

from __future__ import annotations

from benchmarks.moe import CELLS, placement


def test_placed_experts_are_balanced_where_neighbours_and_chance_are_not():
    assert CELLS["placement"] == placement.__name__
    found = placement.run("", quick=True)
    assert found["placement_imbalance"] <= 1.2
    assert found["placement_imbalance_in_order"] > 2.4
    assert found["placement_imbalance_at_random"] > 1.3
