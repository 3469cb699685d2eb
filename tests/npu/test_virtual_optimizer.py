"""Moments in torch_npu's swapped memory, through torch_npu's schemas."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.features.memory.virtual_optimizer import mapped_moments
from mindspeed_dsa.platforms.npu import NpuPlatform
from tests.npu import small_kernels


@pytest.fixture
def adamw_operator():
    import torch_npu  # noqa: F401

    with torch.library._scoped_library("npu", "IMPL") as library:
        library.impl("npu_apply_adam_w.out", small_kernels.npu_apply_adam_w, "CPU")
        yield


@pytest.mark.usefixtures("adamw_operator")
def test_the_operator_makes_the_steps_of_torchs_adamw():
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(size, generator=generator) for size in (5, 300, 7)]
    # torch_npu queries the device for optimizers with multi-tensor kernels.
    rates = {"foreach": False, "lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
    ours, reference = ([tensor.clone() for tensor in start] for _ in range(2))
    optimizer, expected = (torch.optim.AdamW(tensor, **rates) for tensor in (ours, reference))
    # The last one is outside of the quota, and stays the optimizer's own.
    places = {tensor: (torch.zeros_like(tensor), torch.zeros_like(tensor)) for tensor in ours[:2]}
    moments = mapped_moments.Moments(optimizer, places)
    assert not list(mapped_moments.check_adamw(optimizer))
    for _ in range(4):
        for left, right in zip(ours, reference, strict=True):
            left.grad = right.grad = torch.randn(left.shape, generator=generator)
        mapped_moments.step_with_kernels(optimizer, moments, optimizer.step)
        expected.step()
    for left, right in zip(ours, reference, strict=True):
        torch.testing.assert_close(left, right)
        assert left.grad is right.grad
        for key, value in expected.state[right].items():
            torch.testing.assert_close(optimizer.state[left][key], value)
    assert optimizer.state[ours[1]]["exp_avg"] is places[ours[1]][0]


def test_swapped_memory_is_asked_for_on_the_device(monkeypatch):
    import torch_npu

    schema = torch.ops.npu.empty_with_swapped_memory.default._schema
    assert [each.name for each in schema.arguments] == ["size", "dtype", "device"]
    asked = []

    def swapped(*args, **kwargs):
        asked.append((args, kwargs))
        return torch.full(args[0], 7, dtype=kwargs["dtype"])

    monkeypatch.setattr(torch_npu, "empty_with_swapped_memory", swapped)
    monkeypatch.setattr(NpuPlatform, "device", torch.device("cpu"))
    platform = NpuPlatform()
    memory = platform.empty_mapped([6], torch.float32, owner=SimpleNamespace())
    assert asked == [(([6],), {"dtype": torch.float32, "device": torch.device("cpu")})]
    values = torch.tensor([0.0, -1.5, 3e-39, float("inf"), 1e38, 2.0])
    platform.write_mapped(memory, values)
    read = platform.read_mapped(memory)
    assert read.data_ptr() != memory.data_ptr()
    assert torch.equal(read.view(torch.int32), values.view(torch.int32))
