"""The cell ``reach`` of ``benchmarks moe`` counts the experts that pay on simulated clusters."""

from __future__ import annotations

from benchmarks.moe import CELLS, reach


def test_more_imbalance_gains_more():
    assert CELLS["reach"] == reach.__name__
    result = reach.run("", quick=True)["reach"]
    assert result.keys() == reach.CLUSTERS.keys()
    for cluster in result.values():
        speedups = [cell["speedup"] for cell in cluster["EP16"].values()]
        assert speedups == sorted(speedups)
        assert speedups[0] > 1.05
        assert all(cell["moved"] > 0 for cell in cluster["EP16"].values())
