from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dsa.ops.cpu import products
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.ops import oracle
from tests.ops.random_inputs import BACKENDS, DTYPES, random_indices

SHAPES = [
    # heads, dim, value_dim, topk
    pytest.param(16, 576, 512, 64, id="mla"),
    pytest.param(1, 40, 32, 7, id="one-head"),
    pytest.param(3, 24, 24, 65, id="no-rope"),
    pytest.param(128, 576, 512, 20, id="128-heads"),
]
TYPES_AND_SHAPES = [
    pytest.param(
        dtype,
        *shape.values,
        id=f"{str(dtype).removeprefix('torch.')}-{shape.id}",
        marks=pytest.mark.full if dtype == torch.float64 and shape.id == "128-heads" else (),
    )
    for dtype, shape in itertools.product((*DTYPES, torch.float64), SHAPES)
]


def attention_inputs(batch, rows, keys, heads, dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, rows, heads, dim, generator=generator)
    key_value = torch.randn(batch, keys, dim, generator=generator)
    return query.to(dtype).requires_grad_(), key_value.to(dtype).requires_grad_()


def expected_of(query, key_value, indices, scale, value_dim):
    inputs = [x.detach().double().requires_grad_() for x in (query, key_value)]
    mask = oracle.selected_mask(indices, key_value.shape[1])
    return inputs, *oracle.attention(*inputs, mask, scale, value_dim)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "heads", "dim", "value_dim", "topk"), TYPES_AND_SHAPES)
def test_forward_and_backward(backend, dtype, heads, dim, value_dim, topk):
    query, key_value = attention_inputs(2, 19, 83, heads, dim, dtype)
    indices = random_indices(2, 19, 83, topk, empty_rows=(0, 7))
    scale = 192**-0.5

    out, lse, attention_sum = sparse_flash_attention(
        query, key_value, indices, scale, value_dim=value_dim, return_attention_sum=True, backend=backend
    )
    inputs, expected, expected_lse, probabilities = expected_of(query, key_value, indices, scale, value_dim)

    oracle.assert_close(out, expected)
    assert (out[:, [0, 7]] == 0).all()
    some = torch.ones(19, dtype=torch.bool)
    some[[0, 7]] = False
    assert oracle.relative_error(lse[:, some], expected_lse[:, some]) < 1e-6
    assert (lse[:, ~some] == -torch.inf).all()
    summed = probabilities.sum(2).gather(-1, indices.clamp_min(0).long()).masked_fill(indices < 0, 0)
    assert oracle.relative_error(attention_sum, summed) < 1e-5

    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad(out, (query, key_value), factors)
    expected_grads = torch.autograd.grad(expected, inputs, factors.double())
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == dtype
        oracle.assert_close(grad, expected_grad, backward=True)
    assert (grads[0][:, [0, 7]] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_keys_selected_equals_dense_attention(backend):
    query, key_value = attention_inputs(1, 33, 33, 4, 48, torch.float32)
    positions = torch.arange(33).expand(33, 33)
    indices = torch.where(positions <= positions.T, positions, -1).int()[None]
    out = sparse_flash_attention(query, key_value, indices, 0.2, value_dim=32, backend=backend).out
    dense = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key_value[:, None].expand(-1, 4, -1, -1),
        key_value[:, None, :, :32].expand(-1, 4, -1, -1),
        is_causal=True,
        scale=0.2,
    ).transpose(1, 2)
    oracle.assert_close(out, dense)
    factors = torch.randn_like(out)
    for grad, expected in zip(
        torch.autograd.grad(out, (query, key_value), factors),
        torch.autograd.grad(dense, (query, key_value), factors),
        strict=True,
    ):
        oracle.assert_close(grad, expected, backward=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_order_and_padding_of_indices_do_not_matter(backend):
    query, key_value = attention_inputs(1, 21, 60, 5, 40, torch.float32)
    indices = random_indices(1, 21, 60, 30, empty_rows=(4,))
    ascending = torch.where(indices < 0, 60, indices).sort(-1).values
    ascending = torch.where(ascending == 60, -1, ascending).int()
    padded = torch.nn.functional.pad(indices, (0, 50), value=-1)
    results = []
    for variant in (indices, ascending, padded):
        out = sparse_flash_attention(query, key_value, variant, 0.3, value_dim=40, backend=backend).out
        results.append((out, *torch.autograd.grad(out.square().sum(), (query, key_value))))
    for other in results[1:]:
        for value, expected in zip(other, results[0], strict=True):
            assert oracle.relative_error(value, expected) < 2e-6


def test_gradients_are_deterministic():
    query, key_value = attention_inputs(1, 64, 64, 16, 576, torch.float32)
    indices = random_indices(1, 64, 64, 48)

    def gradients():
        out = sparse_flash_attention(query, key_value, indices, 0.1, value_dim=512, backend="cpu").out
        return torch.autograd.grad(out.sin().sum(), (query, key_value))

    for first, second in zip(gradients(), gradients(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_nobody_selected_are_not_touched(backend):
    """NaN in padding must not spread, not even from position 0, where -1 entries could point."""
    query, key_value = attention_inputs(1, 12, 40, 2, 16, torch.float32)
    indices = random_indices(1, 12, 39, 20, empty_rows=(3,))
    indices = torch.where(indices >= 0, indices + 1, -1).int()
    with torch.no_grad():
        key_value[:, 0] = torch.nan
    out = sparse_flash_attention(query, key_value, indices, 0.25, value_dim=12, backend=backend).out
    grads = torch.autograd.grad(out.sum(), (query, key_value))
    for tensor in (out, *grads):
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("way", ["mkl", "onednn"])
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_every_way_to_multiply_gives_the_same(threads, way, monkeypatch):
    """Batched or looped products, chosen by thread count, and the partition of rows give the same result."""
    monkeypatch.setattr(products, "_MKL_IS_FAST", way == "mkl")
    query, key_value = attention_inputs(1, 40, 600, 16, 576, torch.float32)
    indices = random_indices(1, 40, 600, 512)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = sparse_flash_attention(query, key_value, indices, 0.07, value_dim=512, backend="cpu").out
        grads = torch.autograd.grad(out.sin().sum(), (query, key_value))
    finally:
        torch.set_num_threads(before)
    inputs, expected, _, _ = expected_of(query, key_value, indices, 0.07, 512)
    oracle.assert_close(out, expected)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected.sin().sum(), inputs), strict=True):
        oracle.assert_close(grad, expected_grad, backward=True)


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 2),
    rows=st.integers(1, 20),
    keys=st.integers(1, 150),
    heads=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 20), st.integers(0, 9)),
    topk=st.integers(1, 150),
    seed=st.integers(0, 1000),
)
def test_any_shape(batch, rows, keys, heads, sizes, topk, seed):
    value_dim, rope_dim = sizes
    query, key_value = attention_inputs(batch, rows, keys, heads, value_dim + rope_dim, torch.float32, seed)
    indices = random_indices(batch, rows, keys, min(topk, keys), seed, empty_rows=(seed % rows,))
    out = sparse_flash_attention(query, key_value, indices, 0.4, value_dim=value_dim, backend="cpu").out
    inputs, expected, _, _ = expected_of(query, key_value, indices, 0.4, value_dim)
    assert (out - expected).abs().max() < 1e-5
    grads = torch.autograd.grad(out.sin().sum(), (query, key_value))
    expected_grads = torch.autograd.grad(expected.sin().sum(), inputs)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert (grad - expected_grad).abs().max() < 1e-5 * max(1, expected_grad.abs().max())


def test_bad_input_is_refused():
    query, key_value = attention_inputs(1, 4, 10, 2, 8, torch.float32)
    indices = random_indices(1, 4, 10, 3)
    for wrong, message in (
        (indices.clone().fill_(10), "must lie in"),
        (torch.tensor([[[1, -1, 2]] * 4]).int(), "follows -1"),
        (torch.tensor([[[1, 5, 1]] * 4]).int(), "occurs twice in 4 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            sparse_flash_attention(query, key_value, wrong, 1.0, value_dim=4)
    with pytest.raises(ValueError, match=r"value_dim must lie in \[1, 8\]"):
        sparse_flash_attention(query, key_value, indices, 1.0, value_dim=9)
    with pytest.raises(ValueError, match="topk_indices must be int32 or int64"):
        sparse_flash_attention(query, key_value, indices.float(), 1.0, value_dim=4)


@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD", None])
def test_onednn_multiplies_where_mkl_does_not_know_the_processor(vendor, tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    if vendor is not None:
        cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    fast = products.mkl_knows_processor(cpuinfo)
    assert fast == (vendor == "GenuineIntel" and torch.backends.mkl.is_available())
    calls = []
    monkeypatch.setattr(products, "_MKL_IS_FAST", fast)
    monkeypatch.setattr(products, "_LINEAR", lambda x, weight, *_: calls.append(x) or x @ weight.t())
    products.linear(torch.ones(3, 4), torch.ones(2, 4))
    assert bool(calls) != fast
