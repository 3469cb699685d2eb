"""Gloo collectives of expert parallelism: split sizes as numbers, and splits of different sizes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import WorkerPool

# -- functions that run in the pool's workers ------------------------------------------------------


def gather(sizes: list[int], weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather ``sizes[rank]`` rows of each rank; return ``(gathered, gradient of this rank's rows)``.

    Rank ``r`` has the loss ``(r + 1) * weights``, with ``weights`` ``[sum(sizes), 3]``.
    """
    mappings = _mappings()
    rank = dist.get_rank()
    rows = torch.full((sizes[rank], 3), float(rank), requires_grad=True)
    whole = mappings.gather_from_sequence_parallel_region(
        rows, group=dist.group.WORLD, output_split_sizes=sizes
    )
    ((rank + 1) * whole * weights).sum().backward()
    assert rows.grad is not None
    return whole.detach(), rows.grad


def reduce_scatter(sizes: list[int], weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum ``(rank + 1) * weights`` over ranks and keep this rank's rows; return ``(rows, gradient)``.

    The gradient is with respect to the input. Rank ``r`` has the loss ``(r + 1)`` times the sum of its rows.
    """
    mappings = _mappings()
    rank = dist.get_rank()
    whole = ((rank + 1) * weights).requires_grad_()
    rows = mappings.reduce_scatter_to_sequence_parallel_region(
        whole, group=dist.group.WORLD, input_split_sizes=sizes
    )
    ((rank + 1) * rows).sum().backward()
    assert whole.grad is not None
    return rows.detach(), whole.grad


def expert_splits() -> list[str]:
    """Return the types of the split sizes that the token dispatcher gets."""
    import mindspeed_dsa

    mindspeed_dsa.enable(mindspeed_platform="cpu")
    from megatron.core.transformer.moe import token_dispatcher

    move = token_dispatcher.maybe_move_tensor_to_cpu
    sizes = torch.tensor([3, 5])
    return [type(move(sizes, as_numpy=True)).__name__, type(move(sizes)).__name__, type(move(None)).__name__]


def _mappings():
    import mindspeed_dsa

    mindspeed_dsa.enable(mindspeed_platform="cpu")
    from megatron.core.tensor_parallel import mappings

    return mappings


CASES = "tests.features.platform.cpu.test_uneven_splits"


@pytest.mark.parametrize("sizes", [[2, 5], [4, 0], pytest.param([3, 3], marks=pytest.mark.full)], ids=str)
def test_rows_of_any_number_are_gathered_and_their_gradients_return(
    pool: WorkerPool, sizes: list[int]
) -> None:
    weights = torch.rand(sum(sizes), 3)
    results = pool.run(f"{CASES}:gather", 2, sizes=sizes, weights=weights)
    expected = torch.repeat_interleave(torch.arange(2.0), torch.tensor(sizes))[:, None].expand(-1, 3)
    for (whole, gradient), part in zip(results, weights.split(sizes), strict=True):
        torch.testing.assert_close(whole, expected)
        torch.testing.assert_close(gradient, 3 * part)  # both ranks' losses: once and twice the weights


@pytest.mark.parametrize("sizes", [[2, 5], [4, 0], pytest.param([3, 3], marks=pytest.mark.full)], ids=str)
def test_sums_are_scattered_in_any_number(pool: WorkerPool, sizes: list[int]) -> None:
    weights = torch.rand(sum(sizes), 3)
    results = pool.run(f"{CASES}:reduce_scatter", 2, sizes=sizes, weights=weights)
    expected = torch.repeat_interleave(torch.tensor([1.0, 2.0]), torch.tensor(sizes))[:, None].expand(-1, 3)
    for (rows, gradient), part in zip(results, weights.split(sizes), strict=True):
        torch.testing.assert_close(rows, 3 * part)
        torch.testing.assert_close(gradient, expected)


def test_split_sizes_of_the_experts_are_numbers(pool: WorkerPool) -> None:
    assert pool.run(f"{CASES}:expert_splits", 1) == [["ndarray", "Tensor", "NoneType"]]
