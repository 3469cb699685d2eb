"""FSDP2 off Megatron: what is cut where, sums, and the order of gathers."""

from __future__ import annotations

import pytest
import torch

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
        for last in range(UNITS - 1, 1, -1):
            assert backward.index(f"reduce {last - 1}") < backward.index(f"sum of {last}"), "beside backward"
        assert len([event for event in backward if event.startswith("sum of")]) == UNITS + 1


def test_weights_are_gathered_once_for_backward_also_where_layers_run_again(pool):
    assert pool.run("tests.parallel.fsdp2_cases:recompute", 2) == [(UNITS + 1) * 2] * 2


def test_no_weight_is_gathered_for_another_microbatch(pool):
    assert pool.run("tests.parallel.fsdp2_cases:two_microbatches", 2) == [UNITS * 2 * 2] * 2


def test_parameters_are_shards_after_evaluation(pool):
    for shards in pool.run("tests.parallel.fsdp2_cases:evaluate", 2):
        assert all(shards)


@pytest.mark.parametrize(
    ("dtype", "ranks", "apart"),
    [(torch.float32, 2, False), (torch.bfloat16, 2, False), (torch.float32, 4, True)],
    ids=["fp32", "bf16", "replicas added up once"],
)
def test_messages_bring_the_bits_of_fsdp2s_collectives(pool, dtype, ranks, apart):
    for rank in pool.run("tests.parallel.fsdp2_cases:same_bits", ranks, dtype=dtype, apart=apart):
        assert all(rank["equal"])
        assert rank["nonzero"]


def test_a_step_that_failed_leaves_nothing_behind(pool):
    for equal in pool.run("tests.parallel.fsdp2_cases:failed_step", 2):
        assert all(equal)


def test_a_layout_is_refused_where_fsdp2_would_ignore_it(pool):
    for said in pool.run("tests.parallel.fsdp2_cases:laid_out_beside_padded", 2):
        assert "(512, 192) has a layout" in said


def test_gathered_weights_are_copied_once_into_the_layout_that_their_reader_wants(pool):
    odd = 3 * 512 / (3 * 512 + 512 * 192 + 512)
    for rank in pool.run("tests.parallel.fsdp2_cases:copy_out", 2):
        for found in rank.values():
            assert found["weight"]
            assert found["odd"]
            assert found["bias"]
        assert rank["FSDP2"]["written"] == pytest.approx(1 + odd)
        assert rank["one pass"]["written"] == rank["one pass, blocks"]["written"] == 1
        assert rank["messages, blocks"]["written"] == 1


@pytest.mark.parametrize("direct", [True, False], ids=["messages", "collectives"])
def test_weight_gradients_come_after_their_weights_have_gone(pool, direct):
    for rank in pool.run("tests.parallel.fsdp2_cases:delayed", 2, direct=direct):
        assert rank["waiting"] == [3, 3]
        assert rank["without"] == [True, False] * 3, "gains' gradients are there, weights' are not"
        _, computing, done = rank["in use"]
        assert computing > 0
        assert done == 0, "gone since its forward"
        assert rank["storages"] == [0, 0, 0]
        assert all(rank["equal"])
