"""bf16 operands with sums in fp32: by MKL on any processor, if slowly, and by kernels where it has them."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops import cpu_kernel, cpu_products
from mindspeed_dsa.ops.lightning_indexer import cpu_dense as index_dense
from mindspeed_dsa.ops.sparse_flash_attention import cpu_dense
from tests.ops import cases, oracle, test_indexer_kl_loss, test_memory
from tests.ops import test_lightning_indexer as indexer
from tests.ops import test_sparse_attention_by_head as by_head
from tests.ops import test_sparse_flash_attention as attention

pytestmark = pytest.mark.skipif(
    cpu_products._gemm() is None, reason="this PyTorch has no product of bf16 operands with a fp32 result"
)
BF16 = torch.bfloat16


@pytest.fixture(params=["mkl", "kernels"])
def products(request, monkeypatch):
    """The shapes of all products of bf16 operands, as on a processor that multiplies them."""
    calls, threads = [], torch.get_num_threads()
    monkeypatch.setattr(cpu_products, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(cpu_products, "_FEWEST_ROWS_IN_BF16", 1)
    if request.param == "mkl":
        cases.use_libraries(monkeypatch)
        original = cpu_products._mkl_product

        def counted(a, b, out, *others):
            calls.append((tuple(a.shape), tuple(b.shape)))
            return original(a, b, out, *others)

        monkeypatch.setattr(cpu_products, "_mkl_product", counted)
    else:
        # A kernel is for products that one thread computes.
        torch.set_num_threads(1)
        cases.use_kernels(monkeypatch, BF16)
        kernel = cpu_kernel._kernel

        def counted_kernel(dtype):
            def call(m, n, k, *others):
                calls.append(((m, k), (k, n)))
                kernel(dtype)(m, n, k, *others)

            return call if dtype == BF16 else kernel(dtype)

        monkeypatch.setattr(cpu_kernel, "_kernel", counted_kernel)
    yield calls
    torch.set_num_threads(threads)


@pytest.fixture(params=["gathered", "dense"])
def form(request, monkeypatch):
    for module in (cpu_dense, index_dense):
        most_keys = 0 if request.param == "gathered" else 10**9
        monkeypatch.setattr(module, "_most_keys", lambda heads, topk, most_keys=most_keys: most_keys)
    return request.param


@pytest.mark.parametrize(("heads", "dim", "value_dim", "topk"), attention.SHAPES)
def test_attention_equals_the_oracle(products, form, heads, dim, value_dim, topk):
    attention.test_forward_and_backward("cpu", BF16, heads, dim, value_dim, topk)
    # Forward two, backward five; where keys are gathered some of the latter are one.
    assert len(products) >= 5


@pytest.mark.parametrize("use_relu", [True, False])
def test_indexer_equals_the_oracle(products, form, use_relu):
    indexer.test_scores_and_their_gradients("cpu", BF16, use_relu)
    assert products


def test_masked_index_gradients_reach_further_with_mkl(monkeypatch):
    monkeypatch.setattr(cpu_products, "multiplies_bf16", lambda: True)
    shapes = (1, 1, 16, 8), (1, 160, 8), (1, 1, 16)
    query, key, weights = (torch.randn(shape).to(BF16) for shape in shapes)
    entries = torch.arange(16).expand(1, 1, 16)
    for of_intel in (True, False):
        monkeypatch.setattr(index_dense, "mkl_knows_processor", lambda answer=of_intel: answer)
        found = {}
        for dtype in (torch.float32, BF16):
            operands = (x.to(dtype) for x in (query, key, weights))
            found[dtype] = index_dense.takes(torch.ones(1, 1, 16), *operands, entries)
        assert found == {torch.float32: False, BF16: of_intel}


def test_selection_is_that_of_exact_scores(products):
    indexer.test_selects_the_highest_scores("cpu", BF16)
    assert products


@pytest.mark.parametrize("given", ["nothing", "lse"])
def test_loss_equals_the_oracle(products, given):
    test_indexer_kl_loss.test_sparse_form("cpu", BF16, "mean", given)
    assert products


@pytest.mark.parametrize("per_head", [False, True])
def test_dense_loss_equals_the_oracle(products, per_head):
    test_indexer_kl_loss.test_dense_form("cpu", BF16, per_head, True)
    assert products


def test_attention_by_head_equals_the_oracle(products):
    by_head.test_equals_the_oracle(BF16, 3, 40, 24, 17)
    assert products


@pytest.mark.parametrize("run", ["indexer", "attention", "heads", "loss"])
def test_stale_scratch_is_never_read(products, form, run, monkeypatch):
    monkeypatch.setattr(test_memory, "DTYPE", BF16)
    threads = 1 if torch.get_num_threads() == 1 else 3
    test_memory.test_stale_scratch_is_never_read(run, threads, monkeypatch)
    assert products


def layouts(rows, columns):
    """Matrices of random numbers as they lie in memory, contiguous or not, some in a batch."""
    plain = torch.randn(rows, columns)
    yield plain.to(BF16)
    yield torch.randn(columns, rows).to(BF16).t()
    yield torch.randn(rows, 3, columns).to(BF16)[:, 1]
    yield torch.randn(rows, 2 * columns).to(BF16)[:, ::2]
    yield torch.randn(1, columns).to(BF16).expand(rows, columns)


@pytest.mark.parametrize(("m", "k", "n"), [(3, 5, 7), (1, 1, 1), (16, 70, 33), (2, 1, 9), (1, 9, 2)])
def test_products_of_any_layout(products, m, k, n):
    for a in layouts(m, k):
        for b in layouts(k, n):
            expected = a.double() @ b.double()
            whole = torch.full((m, n + 3), torch.nan)
            out = whole[:, :n]
            cpu_products.product(a, b, out, 0.5)
            assert (out - 0.5 * expected).abs().max() < 1e-5 * (1 + expected.abs().max())
            cpu_products.product(a, b, out, 2.0, add=True)
            assert (out - 2.5 * expected).abs().max() < 1e-5 * (1 + expected.abs().max())
            assert whole[:, n:].isnan().all()
            batch = torch.empty(3, m, n)
            cpu_products.product(torch.stack([a, 2 * a, a]), b.expand(3, k, n), batch)
            torch.testing.assert_close(batch[1], 2 * batch[0])
            torch.testing.assert_close(batch[2].double(), expected, rtol=1e-5, atol=1e-5)


def test_sums_keep_more_than_bf16_does(products):
    """The largest relative error of a product of bf16 operands is that of fp32, not a bf16's."""
    a, b = torch.randn(64, 576).to(BF16), torch.randn(576, 64).to(BF16)
    out = torch.empty(64, 64)
    cpu_products.product(a, b, out)
    assert oracle.relative_error(out, a.double() @ b.double()) < 1e-6
    assert oracle.relative_error(a @ b, a.double() @ b.double()) > 1e-4


def test_what_is_asked_of_the_processor(monkeypatch):
    asked = {"_is_amx_tile_supported": False, "_is_avx512_bf16_supported": False}
    for name in asked:
        monkeypatch.setattr(torch.cpu, name, lambda name=name: asked[name], raising=False)
    for vendor, kernels in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(cpu_products, "mkl_knows_processor", lambda vendor=vendor: vendor)
        monkeypatch.setattr(cpu_products, "has_kernel", lambda _, kernels=kernels: kernels)
        for has in [None, *asked]:
            asked.update({name: name == has for name in asked})
            wanted = has is not None and (vendor or kernels)
            assert cpu_products.multiplies_bf16() == wanted
            assert cpu_products.operand_dtype(BF16) == (BF16 if wanted else torch.float32)
            of_few_rows = BF16 if wanted and vendor else torch.float32
            assert cpu_products.operand_dtype(BF16, 15) == of_few_rows
            assert cpu_products.operand_dtype(torch.float32) == torch.float32
    # A release of PyTorch that cannot be asked is one without.
    for name in asked:
        monkeypatch.delattr(torch.cpu, name)
    monkeypatch.setattr(cpu_products, "mkl_knows_processor", lambda: True)
    assert not cpu_products.multiplies_bf16()


def test_operands_of_two_dtypes_are_refused(products):
    with pytest.raises(TypeError, match=r"bfloat16 and torch.float32 into"):
        cpu_products.product(torch.ones(2, 2, dtype=BF16), torch.ones(2, 2), torch.empty(2, 2))


def test_a_result_whose_rows_have_gaps_is_refused(products):
    """It would be written as if they had none."""
    ones = torch.ones(2, 2, dtype=BF16)
    with pytest.raises(ValueError, match="neighbours in memory"):
        cpu_products.product(ones, ones, torch.empty(2, 2).t())
