"""The grouped matmul of every backend available here, against one product per group."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_dsa.ops import checks
from mindspeed_dsa.ops.grouped_matmul import Groups, grouped_matmul, reads_sizes
from tests.ops.grouped_cases import LAYOUTS, SIZES, TOLERANCES, assert_close, check, expected, problem

BACKENDS = ("reference", "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_gradients(backend, dtype, layout, sizes):
    check(backend, sizes, dtype, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "main_grad"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_added_to_what_is_there(backend, dtype, main_grad, layout):
    for sizes in ("uneven", "no rows"):
        check(backend, SIZES[sizes], dtype, layout, main_grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_of_rows_and_of_their_gradient(backend):
    """Rows may be a transposed view, and the output gradient may be expanded, as the gradient of a sum is."""
    sizes = SIZES["uneven"]
    rows, weight, grad = problem(sizes)
    wanted = expected(rows, weight, torch.ones_like(grad), sizes, "kn")
    turned = rows.detach().T.contiguous().T.requires_grad_()
    out = grouped_matmul(turned, weight, sizes, backend=backend)
    out.sum().backward()
    for found, right in zip((out, turned.grad, weight.grad), wanted, strict=True):
        assert_close(found, right, torch.float32, backend)


def test_frozen_weights_and_inputs_without_gradient():
    sizes = SIZES["uneven"]
    rows, weight, grad = problem(sizes)

    def refuse(gradient):
        raise AssertionError("nobody asked for the weight's gradient")

    frozen = grouped_matmul(rows, weight.detach(), sizes, take_gradient=refuse)
    frozen.backward(grad)
    grouped_matmul(rows.detach(), weight, sizes).backward(grad)
    _, rows_wanted, weight_wanted = expected(rows, weight, grad, sizes, "kn")
    assert_close(rows.grad, rows_wanted, torch.float32, "rows.grad")
    assert_close(weight.grad, weight_wanted, torch.float32, "weight.grad")


def test_autocast_does_not_reach_in():
    sizes = SIZES["uneven"]
    rows, weight, grad = problem(sizes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = grouped_matmul(rows, weight, sizes)
        out.backward(grad)
    for result, right in zip(
        (out, rows.grad, weight.grad), expected(rows, weight, grad, sizes, "kn"), strict=True
    ):
        assert_close(result, right, torch.float32, "autocast")


class _Copies(TorchDispatchMode):
    """Records operations that return a tensor as large as the weight."""

    def __init__(self, size):
        super().__init__()
        self.size, self.seen = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(result, torch.Tensor) and result.numel() == self.size:
                self.seen.append(func.overloadpacket)
        return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_backend_turns_the_weight(layout):
    sizes = SIZES["uneven"]
    rows, weight, grad = problem(sizes, layout=layout)
    buffer = torch.zeros_like(weight)
    with _Copies(weight.numel()) as copies:
        out = grouped_matmul(rows, weight, sizes, layout=layout, take_gradient=lambda g: g.add_to(buffer))
        out.backward(grad)
    views = {torch.ops.aten.transpose, torch.ops.aten.detach, torch.ops.aten.view}
    assert set(copies.seen) <= views, copies.seen
    assert torch.ops.aten.transpose in copies.seen


def test_calls_that_do_not_fit_are_refused_by_name():
    rows, weight, _ = problem([3, 4])
    for message, call in (
        ("weight must be", lambda: grouped_matmul(rows, weight, [3, 4], layout="nk")),
        ("layout must be 'kn' or 'nk', got 'nz'", lambda: grouped_matmul(rows, weight, [3, 4], layout="nz")),
        ("whose sum is the number of rows, 7, got 8", lambda: grouped_matmul(rows, weight, [4, 4])),
        ("and -1 as the least", lambda: grouped_matmul(rows, weight, [-1, 8])),
        ("tokens_per_expert must be", lambda: grouped_matmul(rows, weight, [7])),
        ("must be integers", lambda: grouped_matmul(rows, weight, torch.tensor([3.0, 4.0]))),
        ("must have the dtype", lambda: grouped_matmul(rows, weight.double(), [3, 4])),
    ):
        with pytest.raises(ValueError, match="grouped_matmul: ") as error:
            call()
        assert message in str(error.value)


def test_numbers_on_a_device_are_not_read():
    # Reading sizes from a device would wait for it. The meta device has no values to read.
    groups = Groups(torch.empty(2, dtype=torch.int64, device="meta"))
    checks.set_debug_checks(False)
    groups.check("grouped_matmul", 2, 7)
    assert groups.ends(torch.device("meta")).shape == (2,)
    assert not groups.on_host
    assert Groups([3, 4]).ends(torch.device("cpu")).tolist() == [3, 7]


def test_bf16_products_into_fp32_are_those_of_a_linear_layer():
    """Bit-identical to a linear layer without fused accumulation: rounded to bf16, then added in fp32."""
    sizes = SIZES["uneven"]
    rows, weight, grad = problem(sizes, torch.bfloat16, "nk")
    buffer = torch.zeros(weight.shape)
    grouped_matmul(rows, weight, sizes, layout="nk", take_gradient=lambda g: g.add_to(buffer)).backward(grad)
    for matrix, part, one in zip(buffer, rows.split(sizes), grad.split(sizes), strict=True):
        assert torch.equal(matrix, (one.T @ part.detach()).float())
    assert TOLERANCES[torch.bfloat16] < 1e-2


def test_numbers_of_no_rows_are_not_read(monkeypatch):
    # A rank without tokens may have its counts on a device; here on the meta device, which has no values.
    monkeypatch.setattr(checks, "enabled", lambda: False)
    rows, weight = torch.randn(0, 8, requires_grad=True), torch.randn(3, 8, 4, requires_grad=True)
    out = grouped_matmul(rows, weight, torch.zeros(3, dtype=torch.int64, device="meta"))
    out.sum().backward()
    assert out.shape == (0, 4)
    assert not weight.grad.count_nonzero()


def test_the_host_reads_sizes_for_a_cpu():
    weight = torch.randn(3, 8, 4)
    assert reads_sizes(weight, "kn")
    assert reads_sizes(weight.transpose(1, 2), "nk")
