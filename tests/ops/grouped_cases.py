"""Grouped matmul problems and their expected results: one group at a time, in fp64, by autograd."""

from __future__ import annotations

import torch

from mindspeed_dsa.ops.grouped_matmul import Groups, grouped_matmul

SIZES = {
    "uneven": [5, 0, 17, 1, 0, 40],
    "one row": [0, 1, 0],
    "one group": [23],
    "no rows": [0, 0, 0],
    "first and last empty": [0, 70, 0],
    "many groups": [index % 3 for index in range(512)],
}
LAYOUTS = ("kn", "nk")
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def problem(sizes, dtype=torch.float32, layout="kn", width_in=24, width_out=20, device="cpu", seed=0):
    """Return rows, weights and the gradient of the output."""
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=noise).to(device, dtype)

    rows, weight = normal(sum(sizes), width_in), normal(len(sizes), width_in, width_out)
    grad = normal(sum(sizes), width_out)
    if layout == "nk":
        weight = weight.transpose(1, 2).contiguous()
    return rows.requires_grad_(), weight.requires_grad_(), grad


def expected(rows, weight, grad, sizes, layout):
    """Return the output and the gradients of rows and weight, in fp64."""
    rows, weight = (tensor.detach().double().cpu().requires_grad_() for tensor in (rows, weight))
    parts = rows.split(sizes)
    out = torch.cat(
        [part @ (one if layout == "kn" else one.T) for part, one in zip(parts, weight, strict=True)]
    )
    out.backward(grad.double().cpu())
    return out.detach(), rows.grad, weight.grad


def assert_close(found, wanted, dtype, what):
    assert found.shape == wanted.shape, what
    if wanted.numel():
        bound = TOLERANCES[dtype] * max(float(wanted.abs().max()), 1e-30)
        assert float((found.detach().double().cpu() - wanted).abs().max()) <= bound, what


def check(backend, sizes, dtype, layout, main_grad=None, device="cpu", **widths):
    """Compare one call and its backward with a product per group.

    With ``main_grad``, the weight gradient is added twice to a buffer of that dtype. Without it, autograd
    returns the weight gradient.
    """
    rows, weight, grad = problem(sizes, dtype, layout, device=device, **widths)
    out_wanted, rows_wanted, weight_wanted = expected(rows, weight, grad, sizes, layout)
    counts = torch.tensor(sizes, device=device)
    if main_grad is None:
        out = grouped_matmul(rows, weight, counts, layout=layout, backend=backend)
        out.backward(grad)
        assert_close(weight.grad, weight_wanted, dtype, "weight.grad")
        assert weight.grad.dtype == dtype
    else:
        buffer = torch.full(weight.shape, 3.0, dtype=main_grad, device=device)
        gradients = []

        def take(gradient):
            gradients.append(gradient)
            gradient.add_to(buffer)

        out = grouped_matmul(rows, weight, Groups(sizes), layout=layout, take_gradient=take, backend=backend)
        out.backward(grad)
        assert weight.grad is None
        gradients[0].add_to(buffer)
        worse = dtype if TOLERANCES[dtype] > TOLERANCES[main_grad] else main_grad
        assert_close(buffer, 3 + 2 * weight_wanted, worse, "main_grad")
        for index, size in enumerate(sizes):
            if size == 0:
                assert (buffer[index] == 3).all()
    assert_close(out, out_wanted, dtype, "out")
    assert_close(rows.grad, rows_wanted, dtype, "rows.grad")
    assert out.dtype == rows.grad.dtype == dtype
