"""FSDP2 off Megatron: what is cut where, sums, and the order of gathers."""

from __future__ import annotations

from tests.parallel.fsdp2_cases import UNITS


def test_gathers_are_issued_ahead_in_both_directions(pool):
    """Four ranks: the last layer's weight is cut on its second dimension, its bias stays whole."""
    found = pool.run("tests.parallel.fsdp2_cases:train", 4, ahead=2)
    for rank in found:
        assert max(rank["errors"].values()) < 1e-6
        assert "dim=0" in rank["cuts"]["layers.0.weight"]
        assert "dim=1" in rank["cuts"]["last.weight"]
        assert rank["cuts"]["last.bias"] == ""
        assert rank["peak"] <= 2 + 2
        at = rank["events"].index("backward")
        forward, backward = rank["events"][:at], rank["events"][at:]
        assert forward[:8] == [
            *("gather root", "use root", "gather 0", "gather 1"),
            *("use 0", "gather 2", "use 1", "gather 3"),
        ]
        for step in range(UNITS - 2):
            last = UNITS - 1 - step
            assert backward.index(f"gather {last - 2}") < backward.index(f"use {last - 1}")
        assert backward.count("reduce") == UNITS + 1


def test_weights_are_gathered_once_for_backward_also_where_layers_run_again(pool):
    assert pool.run("tests.parallel.fsdp2_cases:recompute", 2) == [(UNITS + 1) * 2] * 2


def test_parameters_are_shards_after_evaluation(pool):
    for shards in pool.run("tests.parallel.fsdp2_cases:evaluate", 2):
        assert all(shards)
