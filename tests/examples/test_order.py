from __future__ import annotations

from itertools import islice

import pytest


def taken(
    consumed: int, size: int, ranks: int, microbatches: int, length: int = 1000
) -> list[list[list[int]]]:
    """Return the samples of each rank and microbatch."""
    from dsa_job.data import MicrobatchOrder  # imports Megatron

    return [
        list(islice(iter(MicrobatchOrder(length, consumed, size, rank, ranks)), microbatches))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(("size", "ranks"), [(1, 1), (8, 1), (2, 1), (1, 2), (2, 4), (1, 8)])
def test_a_global_batch_is_the_same_in_every_layout(size: int, ranks: int) -> None:
    for step in range(3):
        by_rank = taken(consumed=8 * step, size=size, ranks=ranks, microbatches=8 // (size * ranks))
        samples = sorted(index for rank in by_rank for microbatch in rank for index in microbatch)
        assert samples == list(range(8 * step, 8 * step + 8))


def test_an_iterator_goes_on_where_a_new_one_would_start() -> None:
    (long,) = taken(consumed=0, size=2, ranks=1, microbatches=8)
    (short,) = taken(consumed=8, size=2, ranks=1, microbatches=4)
    assert long[4:] == short


def test_after_the_last_sample_comes_the_first() -> None:
    assert taken(consumed=4, size=2, ranks=1, microbatches=2, length=5) == [[[4, 0], [1, 2]]]
