"""Both forms of CPU attention, gathered keys and all keys masked, at sizes that would choose either."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops import checks
from mindspeed_dsa.ops.cpu import blocks
from mindspeed_dsa.ops.cpu import chunks as cpu_chunks
from mindspeed_dsa.ops.sparse_flash_attention import cpu_dense, sparse_flash_attention
from tests.ops import oracle, test_contract, test_memory, test_score_gradient
from tests.ops import test_layouts as layouts
from tests.ops import test_sparse_flash_attention as operator
from tests.ops.random_inputs import DTYPES, packed_ranges, random_indices
from tests.support.counting import noted

FORMS = ("gathered", "dense")


@pytest.fixture
def dense_calls(monkeypatch):
    """Return the list of dense-form functions that were called."""
    return noted(monkeypatch, cpu_dense.forward, cpu_dense.backward)


@pytest.fixture(params=FORMS)
def form(request, monkeypatch, dense_calls):
    """Force one form for all calls, and check afterwards that it was used."""
    # The dense form takes calls with at most this many keys.
    most_keys = 0 if request.param == "gathered" else 10**9
    monkeypatch.setattr(cpu_dense, "most_keys", lambda heads, topk: most_keys)
    yield request.param
    assert set(dense_calls) == (set() if request.param == "gathered" else {"forward", "backward"})


@pytest.fixture(params=["whole", "one row", "odd"])
def chunks(request, monkeypatch):
    """Set the chunking of the dense form: no chunks, or many, few of them equal."""
    # Bytes and rows per chunk, and the step to which widths are rounded up.
    size, rows, step = {"whole": (1 << 30, 10**6, 64), "one row": (1, 128, 1), "odd": (1 << 30, 7, 5)}[
        request.param
    ]
    monkeypatch.setattr(cpu_chunks, "_CHUNK_BYTES", size)
    monkeypatch.setattr(cpu_chunks, "_MOST_ROWS", rows)
    monkeypatch.setattr(cpu_chunks, "_WIDTH_STEP", step)


@pytest.mark.parametrize(("dtype", "heads", "dim", "value_dim", "topk"), operator.TYPES_AND_SHAPES)
def test_each_form_equals_the_oracle(form, dtype, heads, dim, value_dim, topk):
    operator.test_forward_and_backward("cpu", dtype, heads, dim, value_dim, topk)


def test_every_cut_equals_the_oracle(chunks, form):
    operator.test_forward_and_backward("cpu", torch.float32, 3, 24, 20, 17)
    operator.test_all_keys_selected_equals_dense_attention("cpu")
    operator.test_order_and_padding_of_indices_do_not_matter("cpu")


@pytest.mark.parametrize("dtype", test_contract.OUTSIDE)
def test_indices_outside_of_the_keys(chunks, form, dtype):
    test_contract.test_indices_outside_of_the_keys_are_no_keys("cpu", dtype)


@pytest.mark.parametrize("looped", [False, True])
def test_layouts(form, looped, monkeypatch):
    layouts.test_layouts_change_nothing(layouts.attend, "cpu, looped" if looped else "cpu", monkeypatch)


@pytest.mark.parametrize("threads", [1, 3])
def test_stale_scratch(form, threads, monkeypatch):
    monkeypatch.setattr(cpu_chunks, "_MOST_ROWS", 7)
    test_memory.test_stale_scratch_is_never_read("attention", threads, monkeypatch)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_the_sum_in_the_backward(form, dtype):
    test_score_gradient.test_equals_the_loss_from_the_forward("cpu", dtype, "mean")
    test_score_gradient.test_an_output_without_gradient_still_trains_the_indexer("cpu")


def test_no_allocation_has_two_sequence_axes(form, monkeypatch):
    # Minimal chunks and blocks, so that they do not hide growth.
    monkeypatch.setattr(cpu_chunks, "_CHUNK_BYTES", 4096)
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 4096)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sizes = []
        for length in (256, 1024):
            with test_memory.LargestStorage() as seen:
                test_memory.run_attention(length, "cpu")
            sizes.append(seen.bytes)
    finally:
        torch.set_num_threads(before)
    assert sizes[1] <= 4.1 * sizes[0]
    assert sizes[1] < 1024 * 1024, "as much as a mask of bytes"


def attend(query, key_value, indices, factors, backend, scale=0.3):
    """Return the results of a call, its gradients, and the attention sum computed in backward."""
    received = []
    scores = torch.zeros(indices.shape, requires_grad=True)
    result = sparse_flash_attention(
        query,
        key_value,
        indices,
        scale,
        value_dim=8,
        return_attention_sum=True,
        topk_scores=scores,
        score_gradient=lambda total: received.append(total) or total,
        backend=backend,
    )
    grads = torch.autograd.grad(result.out, [query, key_value, scores], factors)
    assert len(received) == 1
    return [*result, *grads]


def inputs(rows=23, keys=90):
    query, key_value = operator.attention_inputs(2, rows, keys, 3, 12, torch.float32)
    return query, key_value, torch.randn(2, rows, 3, 8, generator=torch.Generator().manual_seed(1))


def test_a_key_that_is_listed_twice_counts_twice(chunks, form):
    checks.set_debug_checks(False)
    query, key_value, factors = inputs()
    indices = random_indices(2, 23, 90, 30, empty_rows=(4,))
    # Rows from 10 on list their first key twice, rows from 15 on three times.
    indices[:, 10:, 3] = indices[:, 10:, 0]
    indices[:, 15:, 7] = indices[:, 15:, 0]
    assert ((indices[:, 15:, :1] == indices[:, 15:]).sum(-1) >= 3).any()
    expected = attend(query, key_value, indices, factors, "reference")
    for value, other in zip(attend(query, key_value, indices, factors, "cpu"), expected, strict=True):
        torch.testing.assert_close(value, other, atol=2e-5, rtol=2e-5)


def test_packed_sequences_are_multiplied_with_their_own_keys_only(chunks, form):
    starts, ends = packed_ranges(20, 31, 39)
    position = torch.arange(90)
    visible = (position >= starts[:, None]) & (position < ends[:, None])
    # Visible keys in descending order, then -1. The longest sequence has 39 keys.
    indices = torch.where(visible, position, -1).sort(-1, descending=True).values[:, :39].int()
    indices = indices.expand(2, 90, 39)
    query, key_value, factors = inputs(rows=90)
    expected = attend(query, key_value, indices, factors, "reference")
    for value, other in zip(attend(query, key_value, indices, factors, "cpu"), expected, strict=True):
        torch.testing.assert_close(value, other, atol=2e-5, rtol=2e-5)


def test_scores_far_apart_neither_overflow_nor_vanish(form):
    # A masked score may be far above all selected scores, and the selected far below it.
    query, key_value, factors = inputs()
    indices = random_indices(2, 23, 89, 30, empty_rows=(4,)) + 1
    # Shifted by one, so that no row selects key 0.
    indices = indices.masked_fill(indices == 0, -1)
    with torch.no_grad():
        query.abs_()
        # Scores reach 1e4 for the masked key and stay far below that for selected keys.
        key_value[:, 0] = 1e4
        key_value[:, 1:].mul_(20)
    expected = attend(query, key_value, indices, factors, "reference", 3.0)
    results = attend(query, key_value, indices, factors, "cpu", 3.0)
    for value, other in zip(results, expected, strict=True):
        assert torch.equal(value.isfinite(), other.isfinite())
        assert oracle.relative_error(value.nan_to_num(neginf=0), other.nan_to_num(neginf=0)) < 1e-4
    assert (results[4][:, 0] == 0).all()


# By name: operand of `inputs`, and position of the bad value.
SPOILT = {
    "query": (0, (0, 3, 1)),
    "a key that some select": (1, (0, 0)),
    "a key that no row selects": (1, (0, 85)),
    "gradient": (2, (1, 5, 2)),
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e38])
@pytest.mark.parametrize("where", SPOILT)
def test_what_is_not_finite_reaches_what_depends_on_it_only(where, value, monkeypatch, dense_calls):
    # The dense form would multiply NaN or infinity by zero, so the operator uses the gathered form for such
    # calls.
    # No row selects one of the last ten of 90 keys.
    indices = random_indices(2, 23, 80, 30, empty_rows=(4,))
    tensors = inputs()
    operand, at = SPOILT[where]
    with torch.no_grad():
        tensors[operand][at] = value
    query, key_value, factors = tensors
    results = []
    for most_keys in (10**9, 0):
        monkeypatch.setattr(cpu_dense, "most_keys", lambda heads, topk, most_keys=most_keys: most_keys)
        results.append(attend(query, key_value, indices, factors, "cpu"))
    # A bad gradient is only seen in backward, after a dense forward.
    assert dense_calls == (["forward"] if where == "gradient" else [])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4, equal_nan=True)
        assert where != "a key that no row selects" or not one.isnan().any()
    # Keys that only the affected rows did not select get finite gradients.
    assert results[0][4][:, 80:].isfinite().all()


def test_gradients_are_deterministic(form):
    operator.test_gradients_are_deterministic()


@pytest.mark.parametrize(
    ("heads", "topk", "most"),
    [(1, 48, 576), (4, 48, 576), (16, 512, 2112), (128, 2048, 3744)],
)
def test_which_form_a_call_takes(heads, topk, most, dense_calls):
    """At the measured limit the dense form runs; with one more key the gathered form does."""
    for keys in (most, most + 1):
        query, key_value = operator.attention_inputs(1, 1, keys, heads, 8, torch.float32)
        indices = torch.arange(topk).expand(1, 1, topk).int()
        out = sparse_flash_attention(query, key_value, indices, 0.3, value_dim=4, backend="cpu").out
        torch.autograd.grad(out.sum(), [query, key_value])
    assert dense_calls == ["forward", "backward"]
