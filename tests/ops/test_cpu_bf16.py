"""bf16 operands with sums in fp32: by MKL, on any processor if slowly, and which of both ways is taken."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from mindspeed_dsa.ops.cpu import bf16
from mindspeed_dsa.ops.cpu import products as cpu_products
from mindspeed_dsa.ops.cpu import threads as cpu_threads
from mindspeed_dsa.ops.lightning_indexer import cpu_dense as index_dense
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall
from mindspeed_dsa.ops.sparse_flash_attention import cpu_dense
from tests.ops import oracle, test_indexer_kl_loss, test_memory
from tests.ops import test_lightning_indexer as indexer
from tests.ops import test_sparse_attention_by_head as by_head
from tests.ops import test_sparse_flash_attention as attention
from tests.ops.random_inputs import random_indices

pytestmark = pytest.mark.skipif(
    not cpu_products.has_bf16_product(),
    reason="this PyTorch has no product of bf16 operands with a fp32 result",
)
BF16 = torch.bfloat16


@pytest.fixture
def products(monkeypatch):
    """The shapes of all products of bf16 operands, which are multiplied as they are."""
    calls, original = [], cpu_products._bf16_product

    def counted(a, b, out, *others):
        calls.append((tuple(a.shape), tuple(b.shape)))
        return original(a, b, out, *others)

    monkeypatch.setattr(cpu_products, "_bf16_product", counted)
    monkeypatch.setattr(bf16, "_asked", "native")
    return calls


@pytest.fixture(params=["gathered", "dense"])
def form(request, monkeypatch):
    for module in (cpu_dense, index_dense):
        most_keys = 0 if request.param == "gathered" else 10**9
        monkeypatch.setattr(module, "most_keys", lambda heads, topk, most_keys=most_keys: most_keys)
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


def test_masked_index_gradients_reach_further_with_bf16_operands(monkeypatch):
    shapes = (1, 1, 16, 8), (1, 160, 8), (1, 1, 16)
    query, key, weights = (torch.randn(shape).to(BF16) for shape in shapes)
    entries = torch.arange(16).expand(1, 1, 16)
    for way in ("native", "widened"):
        monkeypatch.setattr(bf16, "_asked", way)
        found = {}
        for dtype in (torch.float32, BF16):
            call = IndexerCall(*(x.to(dtype) for x in (query, key, weights)))
            found[dtype] = index_dense.declines(call, entries, torch.ones(1, 1, 16)) is None
        assert found == {torch.float32: False, BF16: way == "native"}


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
    test_memory.test_stale_scratch_is_never_read(run, 3, monkeypatch)
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


def test_operands_of_two_dtypes_are_refused(products):
    with pytest.raises(TypeError, match=r"bfloat16 and torch.float32 into"):
        cpu_products.product(torch.ones(2, 2, dtype=BF16), torch.ones(2, 2), torch.empty(2, 2))


def test_a_result_whose_rows_have_gaps_is_refused(products):
    """It would be written as if they had none."""
    ones = torch.ones(2, 2, dtype=BF16)
    with pytest.raises(ValueError, match="neighbours in memory"):
        cpu_products.product(ones, ones, torch.empty(2, 2).t())


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has measured nothing, in which both ways can be gone."""
    # What poisons fresh memory rules out measured choices.
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    monkeypatch.setattr(bf16, "_asked", "auto")
    monkeypatch.setattr(bf16, "_agreed", None)
    monkeypatch.setattr(bf16, "_measured", {})
    monkeypatch.setattr(bf16, "_ranks", lambda: 1)
    yield
    torch.set_deterministic_debug_mode(before)


def taking(monkeypatch, **times):
    """As where products take so long, natively and widened; which kinds were measured."""
    calls = []

    def measure(kind):
        calls.append(kind)
        return times[kind.partition(" ")[0]]

    monkeypatch.setattr(bf16, "_measure", measure)
    return calls


def ways():
    return [bf16.operand_dtype(BF16, rows) for rows in (math.inf, 64, 63, 1)]


def test_the_faster_way_is_taken_measured_once_for_each_kind(fresh, monkeypatch, caplog):
    calls = taking(monkeypatch, many=(1.0, 1.3), few=(1.0, 1.1))
    with caplog.at_level("INFO", logger="mindspeed_dsa"):
        assert ways() == ways() == [BF16, BF16, torch.float32, torch.float32]
    assert calls == ["many rows", "few rows"]
    many, few = (next(text for text in caplog.messages if kind in text) for kind in ("many rows", "few rows"))
    assert "multiplied as they are: 1000.00 ms, and 1300.00 ms widened" in many
    assert "multiplied widened to fp32" in few
    assert bf16.operand_dtype(torch.float64) == torch.float64
    assert bf16.operand_dtype(torch.float16) == torch.float32


def test_what_is_slower_is_never_taken(fresh, monkeypatch):
    taking(monkeypatch, many=(3.0, 1.0), few=(1.01, 1.0))
    assert ways() == [torch.float32] * 4


def test_a_measurement_times_both_ways_in_every_thread(fresh):
    before = torch.get_rng_state()
    for kind in bf16._SHAPES:
        assert all(0 < seconds < math.inf for seconds in bf16._measure(kind))
    assert torch.equal(torch.get_rng_state(), before), "a run's random numbers do not depend on it"


def test_deterministic_algorithms_rule_out_a_measured_choice(fresh, monkeypatch):
    calls = taking(monkeypatch, many=(1.0, 9.0), few=(1.0, 9.0))
    torch.set_deterministic_debug_mode("warn")
    assert ways() == [torch.float32] * 4
    bf16.use("native")
    assert ways() == [BF16] * 4
    assert calls == []


def test_a_way_that_is_asked_for_is_taken_unmeasured(fresh, monkeypatch):
    calls = taking(monkeypatch, many=(1.0, 9.0), few=(1.0, 9.0))
    for way, expected in (("widened", torch.float32), ("native", BF16)):
        bf16.use(way)
        assert ways() == [expected] * 4
    assert calls == []
    with pytest.raises(ValueError, match="no way is called 'fast'; choose one of auto, native, widened"):
        bf16.use("fast")


def test_ranks_that_have_not_agreed_widen(fresh, monkeypatch):
    calls = taking(monkeypatch, many=(1.0, 9.0), few=(1.0, 9.0))
    monkeypatch.setattr(bf16, "_ranks", lambda: 2)
    assert ways() == [torch.float32] * 4
    assert calls == []


def test_without_the_product_operands_are_widened(fresh, monkeypatch):
    monkeypatch.setattr(bf16, "has_bf16_product", lambda: False)
    assert ways() == [torch.float32] * 4
    with pytest.raises(ValueError, match="cblas_gemm_bf16bf16f32 of MKL"):
        bf16.use("native")
    assert bf16._asked == "auto"
    assert bf16._times("many rows") == (math.inf, 0.0)


def agreed(times):
    """On one of two ranks, which have measured these times: what both take."""
    mine = times[dist.get_rank()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bf16, "_measured", {f"{kind} rows": found for kind, found in mine.items()})
        try:
            bf16.use("auto")
            bf16.agree()
            return ways()
        finally:
            bf16.use("auto")


def test_ranks_agree_where_each_would_choose_for_itself(pool):
    """By the slower rank's figures."""
    times = [{"many": (1.0, 9.0), "few": (5.0, 1.0)}, {"many": (8.0, 2.0), "few": (1.0, 9.0)}]
    first, second = pool.run(f"{__name__}:agreed", 2, times=times)
    assert first == second == [torch.float32] * 2 + [BF16] * 2


def test_a_library_whose_answer_is_wrong_is_not_used(monkeypatch):
    right = cpu_products._gemm()

    def of_other_sizes(order, of_a, of_b, m, n, k, *rest):
        right(order, of_a, of_b, m, n, k - 1, *rest)

    for gemm, usable in ((right, True), (of_other_sizes, False), (lambda *args: None, False)):
        monkeypatch.setattr(cpu_products, "_gemm", lambda gemm=gemm: gemm)
        cpu_products.has_bf16_product.cache_clear()
        try:
            assert cpu_products.has_bf16_product() == usable
        finally:
            cpu_products.has_bf16_product.cache_clear()


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ((4, 7), (6, 5), (4, 5)),
        ((4, 6), (6, 5), (4, 6)),
        ((4, 6), (6, 5), (3, 5)),
        ((2, 4, 6), (3, 6, 5), (2, 4, 5)),
        ((2, 4, 6), (2, 6, 5), (3, 4, 5)),
        ((2, 4, 6), (6, 5), (2, 4, 5)),
        ((4, 6), (6, 5), (1, 4, 5)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(a, b, out):
    """The library would read and write beyond them; one row too many gave NaN."""
    with pytest.raises(ValueError, match="does not give"):
        cpu_products.product(torch.ones(a, dtype=BF16), torch.ones(b, dtype=BF16), torch.zeros(out))


@pytest.mark.parametrize("threads", [1, 2, 9, 12])
@pytest.mark.parametrize("keys", [192, 257])
def test_threads_and_odd_lengths_change_nothing(products, threads, keys, monkeypatch):
    """Callers and workers used to lay operands out differently at 9 to 15 threads."""
    monkeypatch.setattr(cpu_threads, "_SMALL", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensors, grad = by_head.inputs(2, 40, keys, 4, 12, 8, BF16)
        by_head.check(tensors, grad, random_indices(2, 40, keys, 30, empty_rows=(3,)), 0.3)
    finally:
        torch.set_num_threads(before)
    assert products
