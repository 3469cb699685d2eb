"""Figures of pairs that the benchmark reports without measuring."""

from __future__ import annotations

from benchmarks.pipeline.simulated import entries


def test_simulated():
    found = entries()["PP16 x VPP2, 64 microbatches"]
    steps = {name.removeprefix("step_"): value for name, value in found.items() if name.startswith("step")}
    assert steps == {
        "without_all_to_all": 429,
        "stock": 643.5,
        "pairs": 571.5,
        "pairs_extra_warmup": 477,
        "pairs_extra_warmup_half_hidden_alone": 453,
    }
    assert found["steady_hidden_worst_rank_pairs_extra_warmup"] == 1
    assert found["extra_chunks_in_flight"] == 1
