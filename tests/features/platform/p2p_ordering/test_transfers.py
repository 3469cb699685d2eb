"""Pipelines over gloo compute the same as one process, overlapped or not."""

from __future__ import annotations

import pytest
import torch

from tests.support import third_party

third_party.or_skip("megatron.core")

CASES = "tests.features.platform.p2p_ordering.pipeline_cases"


def test_a_send_survives_the_freeing_of_its_tensor(pool):
    assert pool.run(f"{CASES}:send_then_free", 2, repaired=True)[1] == 1.0


def test_without_the_repair_freed_memory_is_sent(pool):
    """Shows the defect; if this fails, Megatron or torch has fixed it and the repair can go."""
    assert pool.run(f"{CASES}:send_then_free", 2, repaired=False)[1] < 1.0


def test_activations_and_gradients_of_one_batch_are_told_apart(pool):
    assert pool.run(f"{CASES}:exchange_both_ways", 2, repaired=True) == [(11.0, 21.0), (10.0, 20.0)]


def test_without_the_repair_they_are_taken_for_each_other(pool):
    assert pool.run(f"{CASES}:exchange_both_ways", 2, repaired=False) == [(21.0, 11.0), (20.0, 10.0)]


def test_a_send_whose_handle_is_dropped_arrives(pool):
    assert pool.run(f"{CASES}:forget_a_send", 2)[1] == 7.0


@pytest.fixture(scope="module")
def one_process(pool):
    (found,) = pool.run(f"{CASES}:train", 1, pipeline=1, chunks=None, overlap=False, evaluate=True)
    return found


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "batched"])
@pytest.mark.parametrize(("pipeline", "chunks"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.full)])
def test_interleaved_pipelines_train_as_one_process_does(pool, one_process, pipeline, chunks, overlap):
    ranks = pool.run(
        f"{CASES}:train", pipeline, pipeline=pipeline, chunks=chunks, overlap=overlap, evaluate=True
    )
    weights = {}
    for rank in ranks:
        assert rank["losses"] == pytest.approx(one_process["losses"], rel=1e-5)
        assert rank["grad_norms"] == pytest.approx(one_process["grad_norms"], rel=1e-5)
        assert rank["evaluation"] == pytest.approx(one_process["evaluation"], rel=1e-5)
        weights.update(rank["weights"])
    assert weights.keys() == one_process["weights"].keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, one_process["weights"][name], rtol=1e-5, atol=1e-6, msg=name)
