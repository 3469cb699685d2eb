"""Functions for CPUs and NPUs in place of CUDA's names and kernels."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_dsa import platforms
from mindspeed_dsa.features.platform.without_cuda import functions
from tests.support import contexts


@pytest.fixture
def on_npu(monkeypatch):
    """Pretend that the job runs on an NPU; no tensor is on one."""
    memory = SimpleNamespace(total=64, free=24)
    platform = SimpleNamespace(name="npu", device_type="npu", memory=lambda: memory)
    monkeypatch.setattr(platforms, "current", lambda: platform)


def typed(device_type: str, conversions: list[Any]) -> Any:
    """Return a tensor of a device, and torch_npu's ``Tensor.type``, which knows no CUDA names."""
    tensor = SimpleNamespace(device=SimpleNamespace(type=device_type))
    prefix = "torch.npu." if device_type == "npu" else "torch."

    def type(self: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return f"{prefix}BFloat16Tensor"
        conversions.append(dtype)
        return self

    return tensor, type


def test_a_type_equals_the_name_that_megatron_compares_with(on_npu):
    conversions: list[Any] = []
    tensor, theirs = typed("npu", conversions)
    ours = functions.type_as_on_cuda(theirs)
    name = ours(tensor)
    assert name == "torch.cuda.BFloat16Tensor"
    assert name == "torch.npu.BFloat16Tensor"
    assert name in ["torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor"]
    assert str(name) == "torch.npu.BFloat16Tensor"
    for other in ("torch.cuda.FloatTensor", "torch.BFloat16Tensor", None):
        assert name != other
    assert {name: 1}[theirs(tensor)] == 1
    ours(tensor, "torch.cuda.HalfTensor")
    ours(tensor, name)
    ours(tensor, torch.float16)
    assert conversions == ["torch.npu.HalfTensor", "torch.npu.BFloat16Tensor", torch.float16]


def test_a_tensor_elsewhere_keeps_its_name(on_npu):
    tensor, theirs = typed("cpu", [])
    assert functions.type_as_on_cuda(theirs)(tensor) != "torch.cuda.BFloat16Tensor"


@pytest.mark.parametrize("installed", [False, True])
def test_functions_are_compiled_where_an_npu_has_its_triton(on_npu, monkeypatch, installed):
    def distribution(name: str) -> str:
        if not installed:
            raise PackageNotFoundError(name)
        return name

    monkeypatch.setattr(functions, "distribution", distribution)
    fuser = functions.jit_fuser(contexts.context("npu-platform"))
    assert (fuser is torch.compile) == installed
    assert installed or fuser(abs) is abs


def test_memory_that_is_in_use(on_npu):
    assert functions.device_memory_used() == 40
