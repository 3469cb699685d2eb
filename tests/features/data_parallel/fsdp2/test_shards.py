"""FSDP2 without Megatron: cuts of weights, sums of gradients, and the order of gathers."""

from __future__ import annotations

import pytest
import torch
from packaging.specifiers import SpecifierSet

from mindspeed_dsa.features.data_parallel.fsdp2.feature import FEATURE
from tests.features.data_parallel.fsdp2.shards_cases import UNITS

WANTED = SpecifierSet(FEATURE.requires.versions["torch"])
pytestmark = pytest.mark.skipif(
    not WANTED.contains(torch.__version__, prereleases=True),
    reason=f"FSDP2 is refused unless torch is {WANTED}",
)


def test_gathers_are_issued_ahead_in_both_directions(pool):
    """Two units are gathered ahead on four ranks; a weight that rows do not divide is cut by columns."""
    ranks = pool.run("tests.features.data_parallel.fsdp2.shards_cases:train", 4, ahead=2)
    for rank in ranks:
        assert max(rank["errors"].values()) < 1e-6
        assert "dim=0" in rank["cuts"]["layers.0.weight"]
        assert "dim=1" in rank["cuts"]["last.weight"]
        assert rank["cuts"]["last.bias"] == ""
        # The root unit, the current unit, and two units ahead.
        assert rank["peak"] <= 2 + 2
        turn = rank["events"].index("backward")
        forward, backward = rank["events"][:turn], rank["events"][turn:]
        # Two units are gathered before the first one runs, then one more at each use.
        assert forward[:8] == [
            *("gather root", "use root", "gather 0", "gather 1"),
            *("use 0", "gather 2", "use 1", "gather 3"),
        ]
        # Backward gathers in reverse, one unit ahead of its use.
        for step in range(UNITS - 2):
            last = UNITS - 1 - step
            assert backward.index(f"gather {last - 2}") < backward.index(f"use {last - 1}")
        assert len([event for event in backward if event.startswith("reduce")]) == UNITS + 1


def test_weights_are_gathered_once_for_backward_also_where_layers_run_again(pool):
    # Each unit and the root, once in forward and once in backward.
    assert pool.run("tests.features.data_parallel.fsdp2.shards_cases:recompute", 2) == [(UNITS + 1) * 2] * 2


def test_no_weight_is_gathered_for_another_microbatch(pool):
    # Two microbatches, forward and backward, without a root unit.
    assert (
        pool.run("tests.features.data_parallel.fsdp2.shards_cases:two_microbatches", 2) == [UNITS * 2 * 2] * 2
    )


def test_parameters_are_shards_after_evaluation(pool):
    for shards in pool.run("tests.features.data_parallel.fsdp2.shards_cases:evaluate", 2):
        assert all(shards)


def test_a_private_method_of_another_name_or_with_other_parameters_is_reported(pool):
    for said in pool.run("tests.features.data_parallel.fsdp2.shards_cases:renamed", 2):
        assert said["as it is"] == ""
        assert "FSDPState has no method _root_post_backward_final_callback" in said["method"]
        assert "FSDPState has a method _root_post_backward_final_callback(self" in said["parameters"]


def test_first_gradients_are_looked_at(pool):
    for said in pool.run("tests.features.data_parallel.fsdp2.shards_cases:first_gradients", 2):
        assert said["as it is"] == ""
        assert "has not been summed over ranks" in said["reduction not called"]
        assert "torch.bfloat16, and sums are torch.float32" in said["type not read"]


def test_gathered_weights_are_copied_once(pool):
    odd, alone = 3 * 512, 512 * 192
    whole = odd + alone + 512  # the bias
    for rank in pool.run("tests.features.data_parallel.fsdp2.shards_cases:copy_out", 2):
        for copy in rank.values():
            assert copy["weight"]
            assert copy["odd"]
            assert copy["bias"]
        # FSDP2 copies the column-cut weight twice: out of the buffer, and into place.
        assert rank["FSDP2"]["written"] == pytest.approx(1 + odd / whole)
        assert rank["one pass"]["written"] == 1
