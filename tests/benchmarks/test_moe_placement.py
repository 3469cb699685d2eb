"""The bound on the imbalance of placed experts."""

from __future__ import annotations

from benchmarks.moe import CELLS, placement


def test_placed_experts_are_balanced_where_neighbours_and_chance_are_not():
    assert CELLS["placement"] == placement.__name__
    result = placement.run("", quick=True)
    assert result["placement_imbalance"] <= 1.2
    assert result["placement_imbalance_in_order"] > 2.4
    assert result["placement_imbalance_at_random"] > 1.3
