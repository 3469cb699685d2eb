"""A reduce-scatter over gloo that moves each byte once gives the same result as torch's."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mindspeed_dsa.parallel import collectives

# -- functions that run in the pool's workers ------------------------------------------------------


def scattered(dtype: str, op: str = "SUM", async_op: bool = False) -> dict[str, Any]:
    """Return the results of both, and whether ours called torch's."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randint(-8, 8, (3 * ranks, 5), generator=generator).to(getattr(torch, dtype))
    theirs, ours = (torch.full((3, 5), torch.nan).to(whole.dtype) for _ in range(2))
    operation = getattr(dist.ReduceOp, op)
    dist.reduce_scatter_tensor(theirs, whole.clone(), op=operation)
    with mock.patch.object(dist, "reduce_scatter_tensor", wraps=dist.reduce_scatter_tensor) as torchs:
        work = collectives.reduce_scatter_tensor(ours, whole.clone(), op=operation, async_op=async_op)
    if async_op:
        assert work.wait() is True
        assert work.wait() is True  # as often as one likes
        assert work.is_completed()  # the collective's own
        try:
            work.get_future()
        except AttributeError as refused:
            assert "wait()" in str(refused)  # noqa: PT017  only this work refuses
        else:
            raise AssertionError("a future would give parts that are not added up")
    else:
        assert work is None
    return {"theirs": theirs, "ours": ours, "torch's was called": torchs.called}


def scattered_from_columns() -> list[bool]:
    """Return whether a non-contiguous input was exchanged, and whether the result is right."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.arange(10.0 * ranks).view(5, 2 * ranks).t()
    output = torch.empty(2, 5)
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchanged:
        collectives.reduce_scatter_tensor(output, whole)
    return [exchanged.called, output.equal(ranks * whole[2 * rank : 2 * rank + 2])]


def refused(rows: int, dtype: str) -> list[str]:
    """Return torch's errors on an output that does not fit, called directly and through ours."""
    ranks = dist.get_world_size()
    said = []
    with mock.patch.object(dist, "all_to_all_single") as exchanged:
        for scatter in (dist.reduce_scatter_tensor, collectives.reduce_scatter_tensor):
            try:
                scatter(torch.empty(rows, 5, dtype=getattr(torch, dtype)), torch.ones(3 * ranks, 5))
            except (RuntimeError, ValueError, TypeError) as error:
                said.append(str(error).splitlines()[0].split("] ")[-1])  # without the time
    assert not exchanged.called
    return said


def used_by_megatron() -> list[bool]:
    """Return whether Megatron's own regions exchange, and whether their results are right."""
    import mindspeed_dsa

    mindspeed_dsa.enable()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers, mappings

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchanged:
        output = mappings.reduce_scatter_to_sequence_parallel_region(torch.ones(4, 2, 3))
    return [
        exchanged.call_count == 1,
        output.tolist() == torch.full((4 // dist.get_world_size(), 2, 3), dist.get_world_size()).tolist(),
        layers.dist_reduce_scatter_func.__code__ is collectives.reduce_scatter_tensor.__code__,
    ]


CASES = "tests.parallel.test_collectives"


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, {"dtype": "float32"}),
        (3, {"dtype": "float64", "async_op": True}),
        (4, {"dtype": "bfloat16", "async_op": True}),
        (2, {"dtype": "float32", "op": "MAX"}),
    ],
)
def test_the_sum_is_torchs(pool, ranks, arguments):
    """Integers sum exactly in every order; other operations are left to torch."""
    for found in pool.run(f"{CASES}:scattered", ranks, **arguments):
        assert found["ours"].equal(found["theirs"])
        assert found["torch's was called"] == ("op" in arguments)


def test_an_input_that_is_not_contiguous(pool):
    for facts in pool.run(f"{CASES}:scattered_from_columns", 2):
        assert facts == [True, True]


@pytest.mark.parametrize(("rows", "dtype"), [(2, "float32"), (3, "float64")])
def test_what_does_not_fit_is_refused_in_torchs_words(pool, rows, dtype):
    for said in pool.run(f"{CASES}:refused", 2, rows=rows, dtype=dtype):
        assert len(said) == 2
        assert said[0] == said[1]


def test_megatron_uses_it(pool):
    for facts in pool.run(f"{CASES}:used_by_megatron", 2):
        assert facts == [True] * 3
