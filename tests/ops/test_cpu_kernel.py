"""Kernels for single blocks, and what lays out their operands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dsa.ops import cpu_kernel, cpu_threads
from mindspeed_dsa.ops.cpu_blocks import Scratch
from mindspeed_dsa.ops.cpu_gathered import add_to_keys, scores_with, sums_of
from mindspeed_dsa.ops.cpu_packed import first_operand, multiply, pack
from mindspeed_dsa.ops.cpu_products import operand_dtype, product
from tests.ops.cases import use_kernels, use_libraries
from tests.ops.test_cpu_bf16 import layouts

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=["kernels", "libraries"])
def way(request, monkeypatch):
    if request.param == "libraries":
        use_libraries(monkeypatch)
    else:
        use_kernels(monkeypatch, torch.float32)
    return request.param


def operands(*shapes, dtype, seed=0):
    """Random operands in the dtype in which this machine multiplies numbers of ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    kept = operand_dtype(dtype)
    return [torch.randn(shape, generator=generator).to(dtype).to(kept) for shape in shapes]


def close(found, expected):
    assert (found - expected).abs().max() <= 2e-5 * max(1, expected.abs().max())


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 1200), st.integers(1, 1100)),
    dtype=st.sampled_from(DTYPES),
    turned=st.booleans(),
    seed=st.integers(0, 100),
)
def test_a_packed_operand_multiplies_as_the_matrix(sizes, dtype, turned, seed):
    m, k, n = sizes
    a, b = operands((m, k), (n, k) if turned else (k, n), dtype=dtype, seed=seed)
    b = b.t() if turned else b
    scratch = Scratch(torch.float32)
    packed, first = pack(b, a.dtype, scratch, "b"), first_operand(a, a.dtype, scratch, "a")
    whole = torch.full((m, n + 3), torch.nan)
    multiply(first, packed, whole[:, :n])
    expected = a.double() @ b.double()
    close(whole[:, :n], expected)
    multiply(first, packed, whole[:, :n], add=True)
    close(whole[:, :n], 2 * expected)
    assert whole[:, n:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_of_any_layout(way, dtype):
    scratch, kept = Scratch(torch.float32), operand_dtype(dtype)
    for a in layouts(6, 10):
        for b in layouts(10, 9):
            out = torch.empty(6, 9)
            packed = pack(b.to(kept), kept, scratch, "b")
            multiply(first_operand(a.to(kept), kept, scratch, "a"), packed, out)
            close(out, a.double() @ b.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [191, 192])
def test_parts_of_a_packed_operand(way, dtype, keys):
    a, b = operands((5, 24), (keys, 24), dtype=dtype)
    scratch, seen = Scratch(torch.float32), slice(64, keys)
    scores = torch.empty(5, keys - 64)
    multiply(a, pack(b.t(), a.dtype, scratch, "keys").columns(seen), scores)
    close(scores, a.double() @ b[seen].double().t())
    weights = scores.to(a.dtype)
    summed = torch.empty(5, 24)
    rows = pack(b, a.dtype, scratch, "by row").rows(seen)
    multiply(first_operand(weights, a.dtype, scratch, "weights"), rows, summed)
    close(summed, weights.double() @ b[seen].double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width", "dim"), [(16, 128, 24), (7, 33, 10), (1, 64, 9), (8, 600, 576)])
def test_products_with_gathered_keys(way, dtype, heads, width, dim):
    keys, query, weights = operands((3, width, dim), (3, heads, dim), (3, heads, width), dtype=dtype)
    scratch = Scratch(torch.float32)
    scores, summed = torch.empty(3, heads, width), torch.empty(3, heads, dim)
    scores_with(keys, query, scores, scratch, 0.5)
    close(scores, 0.5 * (query.double() @ keys.double().mT))
    sums_of(keys, weights, summed, scratch)
    close(summed, weights.double() @ keys.double())
    # Every key twice in a row, and in several rows.
    indices = torch.arange(3 * width).view(3, width) % (width // 2)
    total = torch.ones(width, dim)
    add_to_keys(total, indices, weights, query, scratch)
    expected = torch.ones(width, dim, dtype=torch.float64)
    expected.index_add_(0, indices.flatten(), (weights.double().mT @ query.double()).flatten(0, 1))
    close(total, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_operand_without_columns_or_summands(way, dtype):
    for m, k, n in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        a, b = operands((m, k), (k, n), dtype=dtype)
        out = torch.full((m, n), 7.0)
        multiply(a, pack(b, a.dtype, Scratch(torch.float32), "b"), out)
        assert not out.count_nonzero()


def test_nan_and_infinity_stay_in_their_rows(monkeypatch):
    use_kernels(monkeypatch, torch.float32)
    a, b = operands((20, 32), (32, 40), dtype=torch.float32)
    a[3], b[:, 5] = torch.nan, torch.inf
    out = torch.empty(20, 40)
    multiply(a, pack(b, a.dtype, Scratch(torch.float32), "b"), out)
    hidden = torch.ones(20, 40, dtype=torch.bool)
    hidden[3], hidden[:, 5] = False, False
    assert out[3].isnan().all()
    assert not out[:, 5].isfinite().any()
    assert out[hidden].isfinite().all()


def test_a_view_that_begins_at_any_number(way):
    """Pairs of bf16 are moved as integers, which begin at every second one."""
    kept = operand_dtype(torch.bfloat16)
    keys, query = operands((1, 64, 8), (1 + 16 * 8,), dtype=torch.bfloat16)
    query = query[1:].view(1, 16, 8)
    scores = torch.empty(1, 16, 64)
    scores_with(keys, query, scores, Scratch(torch.float32))
    close(scores, query.double() @ keys.double().mT)
    packed = pack(query[0].t(), kept, Scratch(torch.float32), "b")
    found = torch.empty(64, 16)
    multiply(keys[0], packed, found)
    close(found, scores[0].t())


@pytest.mark.parametrize("dtype", DTYPES)
def test_far_apart_summands_are_added_in_parts(dtype, monkeypatch):
    use_kernels(monkeypatch, torch.float32)
    monkeypatch.setattr(cpu_kernel, "_MOST_DISTANCE", 4 * 30 * 7)
    a, b = operands((9, 70), (70, 30), dtype=dtype)
    out = torch.empty(9, 30)
    multiply(a, pack(b, a.dtype, Scratch(torch.float32), "b"), out)
    close(out, a.double() @ b.double())


def test_many_shapes_are_left_to_libraries(monkeypatch):
    use_kernels(monkeypatch, torch.float32)
    monkeypatch.setattr(cpu_kernel, "_shapes", set())
    monkeypatch.setattr(cpu_kernel, "_MOST_SHAPES", 1)
    a, b = operands((9, 70), (70, 30), dtype=torch.float32)
    out = torch.empty(9, 30)
    for known in (True, False):
        assert cpu_kernel.has_kernel(torch.float32) == known
        multiply(a, pack(b, a.dtype, Scratch(torch.float32), "b"), out)
        close(out, a.double() @ b.double())


def test_what_does_not_fit_is_refused(monkeypatch):
    use_kernels(monkeypatch, torch.float32)
    a, b, out = torch.ones(4, 6), torch.ones(6, 5), torch.empty(4, 5)
    for wrong in ((a, b.double(), out), (a.double(), b.double(), out), (a, b, out.bfloat16())):
        with pytest.raises(ValueError, match="no kernel for"):
            cpu_kernel.block_product(*wrong)
    for wrong in ((a[:, :4], b, out), (a, b, out[:, :4]), (a[:2], b, out)):
        with pytest.raises(ValueError, match="does not give"):
            cpu_kernel.block_product(*wrong)
    with torch.backends.mkldnn.flags(enabled=False), pytest.raises(RuntimeError, match="switched off"):
        cpu_kernel.block_product(a, b, out)


def test_with_many_threads_libraries_multiply(monkeypatch):
    use_kernels(monkeypatch, torch.float32)
    monkeypatch.setattr(cpu_threads.torch, "get_num_threads", lambda: 9)
    assert not cpu_kernel.has_kernel(torch.float32)


@pytest.mark.parametrize("why", ["Intel", "no symbol", "told to use less", "switched off"])
def test_where_there_are_no_kernels(why, monkeypatch):
    if why == "Intel":
        monkeypatch.setattr(cpu_kernel, "mkl_knows_processor", lambda: True)
    elif why == "no symbol":
        monkeypatch.setattr(cpu_kernel, "of_torch", lambda name: None)
    elif why == "told to use less":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    cpu_kernel._kernel.cache_clear()
    try:
        with torch.backends.mkldnn.flags(enabled=why != "switched off"):
            for dtype in DTYPES:
                assert not cpu_kernel.has_kernel(dtype)
            a, b = operands((80, 64), (64, 80), dtype=torch.bfloat16)
            out = torch.empty(80, 80)
            product(a, b, out)
            close(out, a.double() @ b.double())
    finally:
        cpu_kernel._kernel.cache_clear()


def test_bf16_needs_a_processor_that_multiplies_it(monkeypatch):
    monkeypatch.setattr(cpu_kernel, "processor_has_bf16", lambda: False)
    cpu_kernel._kernel.cache_clear()
    try:
        assert not cpu_kernel.has_kernel(torch.bfloat16)
    finally:
        cpu_kernel._kernel.cache_clear()


def test_fp64_has_no_kernel():
    assert not cpu_kernel.has_kernel(torch.float64)
