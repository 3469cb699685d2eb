"""Calls that HCCL refuses, tested with host tensors that claim to be on an NPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_dsa import platforms
from mindspeed_dsa.features.platform.npu import hccl


class OnNpu(torch.Tensor):
    """Host tensor that says its device is an NPU."""

    @property
    def device(self) -> Any:
        return SimpleNamespace(type="npu")


def refusing(asked: list[torch.dtype]):
    """Return a stand-in for HCCL's reduction without fp64; ``asked`` collects the dtypes that reach it."""

    def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        asked.append(tensor.dtype)
        if tensor.dtype == torch.float64 and isinstance(tensor, OnNpu):
            raise RuntimeError("HCCL allreduce: Unsupported data type at::kDouble")
        return dist.all_reduce(tensor, op, group, async_op)

    return all_reduce


# -- functions that run in the pool's workers ------------------------------------------------------


def reduce(shape: list[int], asynchronous: bool) -> dict[str, torch.Tensor]:
    """Reduce fp64 numbers of all ranks by each operation; return results by its name."""
    results = {}
    for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
        asked: list[torch.dtype] = []
        all_reduce = hccl.reduce_doubles(refusing(asked))
        numbers = (numbers_of(dist.get_rank(), shape)).as_subclass(OnNpu)
        work = all_reduce(numbers, op=getattr(dist.ReduceOp, name), async_op=asynchronous)
        assert (work is not None) == asynchronous
        if work is not None:
            work.wait()
        assert asked == []
        results[name] = numbers.as_subclass(torch.Tensor)
    return results


def leave_others() -> list[torch.dtype]:
    """Return the dtypes of calls passed on to HCCL: other dtypes, host tensors and other operations."""
    asked: list[torch.dtype] = []
    all_reduce = hccl.reduce_doubles(refusing(asked))
    whole = torch.ones(2).as_subclass(OnNpu)
    all_reduce(whole)
    assert whole.tolist() == [2, 2]
    all_reduce(torch.ones(2, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="kDouble"):
        all_reduce(torch.ones(2, dtype=torch.float64).as_subclass(OnNpu), op=dist.ReduceOp.BXOR)
    return asked


def numbers_of(rank: int, shape: list[int]) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)) + 1.7e9


CASES = "tests.features.platform.npu.test_hccl"


@pytest.mark.parametrize(("shape", "asynchronous"), [([1], False), ([3, 2], True), ([], False)], ids=str)
def test_doubles_are_reduced_to_the_bit(pool, shape, asynchronous):
    rows = torch.stack([numbers_of(rank, shape) for rank in range(2)])
    expected = {
        "SUM": rows.sum(0),
        "AVG": rows.mean(0),
        "MIN": rows.amin(0),
        "MAX": rows.amax(0),
        "PRODUCT": rows.prod(0),
    }
    for results in pool.run(f"{CASES}:reduce", 2, shape=shape, asynchronous=asynchronous):
        for name, numbers in expected.items():
            assert results[name].dtype == torch.float64
            assert torch.equal(results[name], numbers), name


def test_hccl_keeps_what_it_takes(pool):
    expected = [torch.float32, torch.float64, torch.float64]
    assert pool.run(f"{CASES}:leave_others", 2) == [expected, expected]


@pytest.mark.parametrize("backend", ["hccl", "cpu:gloo,npu:hccl"])
def test_signals_are_gathered_on_the_device_of_the_backend(monkeypatch, backend):
    def theirs(local_rank: Any = None) -> Any:
        return "Megatron's"

    device = hccl.device_of_hccl(theirs)
    monkeypatch.setattr(platforms, "current", lambda: SimpleNamespace(device="npu:3"))
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    assert device() == device(2) == "npu:3"
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert device() == "Megatron's"
