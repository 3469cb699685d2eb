"""What expert parallelism needs of gloo: numbers for split sizes, and splits of different sizes."""

from __future__ import annotations

import pytest
import torch

from tests.support.pool import WorkerPool

CASES = "tests.features.platform.cpu.uneven_cases"


@pytest.mark.parametrize("sizes", [[2, 5], [4, 0], [3, 3]], ids=str)
def test_rows_of_any_number_are_gathered_and_their_gradients_return(
    pool: WorkerPool, sizes: list[int]
) -> None:
    weights = torch.rand(sum(sizes), 3)
    results = pool.run(f"{CASES}:gather", 2, sizes=sizes, weights=weights)
    expected = torch.repeat_interleave(torch.arange(2.0), torch.tensor(sizes))[:, None].expand(-1, 3)
    for (whole, gradient), part in zip(results, weights.split(sizes), strict=True):
        torch.testing.assert_close(whole, expected)
        torch.testing.assert_close(gradient, 3 * part)  # both ranks' losses: once and twice the weights


@pytest.mark.parametrize("sizes", [[2, 5], [4, 0], [3, 3]], ids=str)
def test_sums_are_scattered_in_any_number(pool: WorkerPool, sizes: list[int]) -> None:
    weights = torch.rand(sum(sizes), 3)
    results = pool.run(f"{CASES}:reduce_scatter", 2, sizes=sizes, weights=weights)
    expected = torch.repeat_interleave(torch.tensor([1.0, 2.0]), torch.tensor(sizes))[:, None].expand(-1, 3)
    for (rows, gradient), part in zip(results, weights.split(sizes), strict=True):
        torch.testing.assert_close(rows, 3 * part)
        torch.testing.assert_close(gradient, expected)


def test_split_sizes_of_the_experts_are_numbers(pool: WorkerPool) -> None:
    assert pool.run(f"{CASES}:expert_splits", 1) == [["ndarray", "Tensor", "NoneType"]]
