"""The grouped matmul through torch_npu's own operators."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.features.platform.without_apex.functions import Kernels
from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.grouped_matmul import backends
from mindspeed_dsa.ops.npu import device as npu_device
from tests.npu import grouped_kernels
from tests.ops.grouped_cases import LAYOUTS, SIZES, check


@pytest.fixture(autouse=True)
def operators(npu_kernels):
    grouped_kernels.calls.clear()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_forward_and_gradients(dtype, layout):
    for name in ("uneven", "one row", "no rows"):
        check("npu", SIZES[name], dtype, layout)
    # Forward and dX read the weight without a copy, one of them as a transposed view.
    assert grouped_kernels.calls[:3] == [
        ("npu_grouped_matmul", 0, layout == "nk"),
        ("npu_grouped_matmul", 0, layout == "kn"),
        ("npu_grouped_matmul", 2),
    ]
    assert len(grouped_kernels.calls) == 2 * 3, "without rows there is nothing to call"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("main_grad", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_added_to_what_is_there(main_grad, layout):
    check("npu", SIZES["uneven"], torch.bfloat16, layout, main_grad)
    added = ("npu_grouped_matmul_add_",) if main_grad == torch.float32 else ("npu_grouped_matmul", 2)
    assert grouped_kernels.calls[2:] == [added] * 2


def test_an_older_torch_npu_adds_in_a_second_step(monkeypatch):
    monkeypatch.setattr(backends, "_adds_in_place", lambda into: False)
    check("npu", SIZES["uneven"], torch.bfloat16, "nk", torch.float32)
    assert grouped_kernels.calls[2:] == [("npu_grouped_matmul", 2)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_linear_layer_adds_its_gradient_as_one_group(dtype):
    """Nothing is rounded to 16 bits; without fusion it is."""
    rows, grad_output = torch.randn(300, 24).to(dtype), torch.randn(300, 40).to(dtype)
    main_grad = torch.randn(40, 24)
    expected = main_grad.double() + grad_output.double().t() @ rows.double()
    Kernels.wgrad_gemm_accum_fp32(rows, grad_output, main_grad)
    assert grouped_kernels.calls == [("npu_grouped_matmul_add_",)]
    torch.testing.assert_close(main_grad.double(), expected, rtol=1e-5, atol=1e-4)


def test_linear_layers_that_the_operator_does_not_take(monkeypatch):
    def added(dtype=torch.bfloat16, width=8):
        rows, grad_output, main_grad = torch.randn(4, 3), torch.randn(4, width), torch.ones(width, 3)
        rows, grad_output = rows.to(dtype), grad_output.to(dtype)
        Kernels.wgrad_gemm_accum_fp32(rows, grad_output, main_grad)
        torch.testing.assert_close(main_grad, 1 + (grad_output.t() @ rows).float(), rtol=8e-3, atol=8e-3)
        return bool(grouped_kernels.calls)

    assert not added(torch.float32)
    assert not added(width=65536)
    with monkeypatch.context() as patch:
        patch.setattr(backends, "_adds_in_place", lambda into: False)
        assert not added()
    assert added()


def test_limits_have_names(monkeypatch):
    def refused(dtype=torch.bfloat16, groups=8, width=8):
        return backends.Npu().unsupported(
            ShapeClass("cpu", dtype, (("groups", groups), ("in", 8), ("out", width)))
        )

    assert refused() is None
    assert "bfloat16 and float16 only" in refused(torch.float32)
    assert "at most 1024 groups" in refused(groups=1025)
    assert "shorter than 65536" in refused(width=65536)
    monkeypatch.setattr(npu_device, "takes_device", lambda device: False)
    assert refused() == "it runs on NPU tensors only"
