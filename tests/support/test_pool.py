"""The worker pool itself: everything below relies on it to fail when something goes wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.support.pool import CaseError, WorkerPool

CASES = "tests.support.pool_cases"


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """A pool of its own: the failures below would cost the other tests their warm workers."""
    with WorkerPool(size=2) as workers:
        yield workers


def test_results_come_by_rank_and_processes_are_reused(pool: WorkerPool) -> None:
    first = pool.run(f"{CASES}:describe", 2, payload=torch.ones(3))
    again = pool.run(f"{CASES}:describe", 1, payload=torch.full((2,), 5.0))
    assert [result["rank"] for result in first] == [0, 1]
    assert [result["world_size"] for result in first] == [2, 2]
    assert all(torch.equal(result["total"], torch.full((3,), 3.0)) for result in first)
    assert torch.equal(again[0]["total"], torch.full((2,), 5.0))
    assert again[0]["pid"] == first[0]["pid"] != os.getpid()
    assert {result["threads"] for result in (*first, *again)} == {1}


def test_an_exception_on_one_rank_fails_the_case_with_its_traceback(pool: WorkerPool) -> None:
    before = pool.run(f"{CASES}:describe", 2, payload=torch.ones(1))
    with pytest.raises(CaseError) as error:
        pool.run(f"{CASES}:raise_on_one_rank", 2, rank=1)
    assert "rank 1 raised" in str(error.value)
    assert "RuntimeError: no luck on rank 1" in str(error.value)
    assert "about to go wrong" in str(error.value)
    after = pool.run(f"{CASES}:describe", 2, payload=torch.ones(1))
    assert {result["pid"] for result in after}.isdisjoint(result["pid"] for result in before)


def test_a_rank_that_dies_fails_the_case(pool: WorkerPool) -> None:
    with pytest.raises(CaseError, match="rank 1 died with exit code 7"):
        pool.run(f"{CASES}:die_on_one_rank", 2, rank=1)
    assert len(pool.run(f"{CASES}:describe", 2, payload=torch.ones(1))) == 2


@pytest.mark.full
def test_a_rank_that_hangs_fails_the_case_with_its_stack(pool: WorkerPool) -> None:
    pool.run(f"{CASES}:describe", 2, payload=torch.ones(1))  # start-up does not count
    with pytest.raises(CaseError) as error:
        pool.run(f"{CASES}:hang_on_one_rank", 2, timeout_s=5, rank=0)
    assert "rank 0 did not answer in time" in str(error.value)
    assert "in fall_asleep" in str(error.value)


def test_a_result_that_cannot_be_sent_fails_the_case(pool: WorkerPool) -> None:
    with pytest.raises(CaseError, match="the result cannot be sent"):
        pool.run(f"{CASES}:return_what_cannot_be_sent", 1)


def test_more_ranks_than_workers_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="2 workers at most; 3 ranks"):
        pool.run(f"{CASES}:describe", 3, payload=torch.ones(1))


@pytest.mark.full
def test_nothing_of_a_case_is_left_for_the_next(pool: WorkerPool) -> None:
    untouched = pool.run(f"{CASES}:what_is_left", 2)
    pool.run(f"{CASES}:change_everything", 2)
    assert pool.run(f"{CASES}:what_is_left", 2) == untouched
    pool.run(f"{CASES}:change_everything", 2)  # and it can all be done again
