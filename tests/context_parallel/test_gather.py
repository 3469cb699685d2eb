"""Rows of all ranks in the order of the sequence, and gradients summed over ranks."""

from __future__ import annotations

import pytest

CASES = "tests.context_parallel.gather_cases"


@pytest.mark.parametrize(
    ("ranks", "given", "runs"),
    [
        (2, {}, 2),
        pytest.param(3, {"freed": True}, 2, marks=pytest.mark.full),
        (4, {"tensor_ranks": 2}, 1),  # each has a part of one chunk
        pytest.param(
            4, {"block_rows": 2, "freed": True}, 0, marks=pytest.mark.full
        ),  # reordered after they arrive
        pytest.param(3, {"tensor_ranks": 3}, 1, marks=pytest.mark.full),
        (2, {"dtype": "bfloat16"}, 2),
    ],
)
def test_rows_arrive_in_order_and_gradients_add_up(pool, ranks, given, runs):
    for facts in pool.run(f"{CASES}:gathered", ranks, **given):
        bound = 4e-3 if given.get("dtype") == "bfloat16" else 1e-15
        assert facts.pop("backward") <= bound
        assert facts == {"forward": True, "runs": runs, **({"freed": True} if "freed" in given else {})}


def test_equal_gradients_of_tensor_parallel_ranks_count_once(pool):
    for facts in pool.run(f"{CASES}:summed_over_context_ranks", 4):
        assert facts == [True]


@pytest.mark.parametrize(("with_receiver", "expected"), [(True, 2.0**-9), (False, 0.0)])
def test_parts_are_added_up_before_they_are_rounded(pool, with_receiver, expected):
    found = pool.run(f"{CASES}:sum_of_narrow_parts", 2, with_receiver=with_receiver)
    assert found == [expected] * 2


def test_the_sum_is_under_way_while_backward_computes(pool):
    for events in pool.run(f"{CASES}:order_of_backward", 2):
        assert events == ["start_sum", "product", "summed"]


@pytest.mark.parametrize(("ranks", "block_rows"), [(2, 0), (3, 2), (2, 1)])
def test_every_row_gets_the_next_one(pool, ranks, block_rows):
    assert pool.run(f"{CASES}:rolled_rows", ranks, block_rows=block_rows) == [True] * ranks
