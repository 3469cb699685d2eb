"""fp16 gradients survive incoming gradients that are too small for fp16."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.indexer_kl_loss import dense_indexer_kl_loss
from mindspeed_dsa.ops.lightning_indexer import selected_scores
from mindspeed_dsa.ops.precision import raising_factor
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.ops import oracle
from tests.ops.random_inputs import indexer_inputs, random_indices
from tests.ops.test_indexer_kl_loss import main_inputs
from tests.ops.triton_backend import DEVICE

UPSTREAM = (1.0, 1e-4, 1e-6, 1e-7)


def leaves_of(inputs, *, factor):
    """Return fp16 leaves scaled so that fp16 can hold their gradients, and the same leaves in fp32."""
    narrow = [(x * f).half().requires_grad_() for x, f in zip(inputs, factor, strict=True)]
    return narrow, [x.detach().float().requires_grad_() for x in narrow]


def check(narrow, wide):
    for grad, expected in zip(narrow, wide, strict=True):
        assert grad.dtype == torch.float16
        # Rounding loses at most half of fp16's smallest subnormal, 2^-24 / 2.
        lost = 2**-25 / expected.abs().max()
        assert oracle.relative_error(grad, expected) < 3e-3 + lost
        assert lost < 0.02


def device_of(backend):
    return "cpu" if backend == "cpu" else DEVICE


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("upstream", UPSTREAM)
def test_index_scores(backend, upstream):
    device = device_of(backend)
    narrow, wide = leaves_of(indexer_inputs(1, 9, 20), factor=(20, 20, 1))
    indices = random_indices(1, 9, 20, 12)
    factors = upstream * torch.randn(indices.shape, generator=torch.Generator().manual_seed(1))
    scores = selected_scores(*(x.to(device) for x in narrow), indices.to(device), backend=backend).cpu()
    expected = selected_scores(*wide, indices, backend="reference")
    valid = indices >= 0
    grads = torch.autograd.grad((scores[valid] * factors[valid]).sum(), narrow)
    check(grads, torch.autograd.grad((expected[valid] * factors[valid]).sum(), wide))


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("scale", [2.0**10, 2.0**14, 2.0**17])
def test_dense_loss_under_a_loss_scale(backend, scale):
    """A loss scale arrives in backward, after the forward has computed gradients that fp16 cannot hold."""
    # The mean is over few rows; small weights imitate many rows. fp16 ends before the last of these scales.
    device = device_of(backend)
    narrow, wide = leaves_of(indexer_inputs(1, 12), factor=(1, 1, 1e-3))
    query, key = main_inputs(1, 12, 4, 24, torch.float16)
    main = query.to(device), key.to(device)
    index = [x.to(device) for x in narrow]
    loss = dense_indexer_kl_loss(*index, *main, 0.2, backend=backend).cpu()
    expected = dense_indexer_kl_loss(*wide, query.float(), key.float(), 0.2, backend="reference")
    check(torch.autograd.grad(loss * scale, narrow[:2]), torch.autograd.grad(expected * scale, wide[:2]))


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("upstream", UPSTREAM)
def test_attention(backend, upstream):
    device = device_of(backend)
    query, key_value = main_inputs(1, 5, 4, 24, keys=40)
    narrow, wide = leaves_of((query, key_value), factor=(1, 40))
    indices = random_indices(1, 5, 40, 33)
    out = sparse_flash_attention(
        *(x.to(device) for x in narrow), indices.to(device), 0.005, value_dim=16, backend=backend
    ).out.cpu()
    expected = sparse_flash_attention(*wide, indices, 0.005, value_dim=16, backend="reference").out
    # The incoming gradient is fp16, so compare with its rounded values.
    factors = (upstream * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).half()
    grads = torch.autograd.grad(out, narrow, factors)
    expected_grads = torch.autograd.grad(expected, wide, factors.float())
    for grad, other in zip(grads, expected_grads, strict=True):
        error = (grad.float() - other).abs().max()
        assert error < 4e-3 * other.abs().max() + 2**-25


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-30, 1e-7, 0.75, 1.0, 3.0, 1e30, torch.inf, torch.nan])
def test_raising_factor(largest):
    factor = raising_factor(torch.tensor(largest), 4).item()
    assert torch.frexp(torch.tensor(factor)).mantissa == 0.5
    assert factor >= 1
    if 1e-12 < largest < 8:
        assert 8 <= largest * factor < 16
    elif not largest < 8:
        assert factor == 1
