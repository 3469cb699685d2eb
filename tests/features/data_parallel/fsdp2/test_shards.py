"""FSDP2 off Megatron: what is cut where, sums, and the order of gathers."""

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
    """Four ranks: the last layer's weight is cut on its second dimension, its bias stays whole."""
    found = pool.run("tests.features.data_parallel.fsdp2.shards_cases:train", 4, ahead=2)
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
        for last in range(UNITS - 1, 1, -1):
            assert backward.index(f"reduce {last - 1}") < backward.index(f"sum of {last}"), "beside backward"
        assert len([event for event in backward if event.startswith("sum of")]) == UNITS + 1


def test_weights_are_gathered_once_for_backward_also_where_layers_run_again(pool):
    assert pool.run("tests.features.data_parallel.fsdp2.shards_cases:recompute", 2) == [(UNITS + 1) * 2] * 2


def test_no_weight_is_gathered_for_another_microbatch(pool):
    assert (
        pool.run("tests.features.data_parallel.fsdp2.shards_cases:two_microbatches", 2) == [UNITS * 2 * 2] * 2
    )


def test_parameters_are_shards_after_evaluation(pool):
    for shards in pool.run("tests.features.data_parallel.fsdp2.shards_cases:evaluate", 2):
        assert all(shards)


@pytest.mark.parametrize(
    ("dtype", "ranks", "apart"),
    [(torch.float32, 2, False), (torch.bfloat16, 2, False), (torch.float32, 4, True)],
    ids=["fp32", "bf16", "replicas added up once"],
)
def test_messages_bring_the_bits_of_fsdp2s_collectives(pool, dtype, ranks, apart):
    for rank in pool.run(
        "tests.features.data_parallel.fsdp2.shards_cases:same_bits", ranks, dtype=dtype, apart=apart
    ):
        assert all(rank["equal"])
        assert rank["nonzero"]


def test_a_step_that_failed_leaves_nothing_behind(pool):
    for equal in pool.run("tests.features.data_parallel.fsdp2.shards_cases:failed_step", 2):
        assert all(equal)


def test_a_private_method_of_another_name_or_with_other_parameters_is_reported(pool):
    for said in pool.run("tests.features.data_parallel.fsdp2.shards_cases:renamed", 2):
        assert said["as it is"] == said["as it is, in parts"] == ""
        assert "FSDPParamGroup has no method finalize_backward" in said["method"]
        assert "FSDPParamGroup has a method unshard(self" in said["parameters"]
        assert "FSDPState has no method _root_post_backward_final_callback" in said["of a state"]


def test_first_gradients_are_looked_at(pool):
    for said in pool.run("tests.features.data_parallel.fsdp2.shards_cases:first_gradients", 2):
        assert said["messages"] == said["collectives"] == ""
        assert "1 sums of gradients are still on their way" in said["end not called"]
        assert "has not been summed over ranks" in said["reduction not called"]
        assert "torch.bfloat16, and sums are torch.float32" in said["type not read"]


def test_a_release_that_was_not_tried_has_fsdp2s_own_collectives(pool):
    first, second = pool.run("tests.features.data_parallel.fsdp2.shards_cases:untried", 2)
    for rank in (first, second):
        assert rank["direct"] == [True, False, False]
        assert all(rank["equal"])
    assert len(first["said"]) == 1
    assert first["said"][0].startswith("torch 9.0.0 was not tried")
    assert second["said"] == []


def test_gathered_weights_are_copied_once(pool):
    odd, alone = 3 * 512, 512 * 192
    whole = odd + alone + 512
    for rank in pool.run("tests.features.data_parallel.fsdp2.shards_cases:copy_out", 2):
        for found in rank.values():
            assert found["weight"]
            assert found["odd"]
            assert found["bias"]
        assert rank["FSDP2"]["written"] == pytest.approx(1 + odd / whole)
        assert rank["one pass"]["written"] == 1
        # The weight has come straight into its place; small ones have shared a message.
        assert rank["messages"]["written"] == pytest.approx(1 - alone / whole)
