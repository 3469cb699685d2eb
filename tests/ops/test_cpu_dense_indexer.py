"""Both forms of the index gradients on CPUs, gathered keys and all keys, at sizes that would choose
either.
"""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops import checks
from mindspeed_dsa.ops.cpu import chunks as cpu_chunks
from mindspeed_dsa.ops.lightning_indexer import cpu_dense, selected_scores
from tests.ops import oracle, test_contract, test_memory
from tests.ops import test_lightning_indexer as operator
from tests.ops.random_inputs import DTYPES, indexer_inputs, random_indices


@pytest.fixture
def dense_calls(monkeypatch):
    """Return a list that grows with every call of the dense form."""
    calls, original = [], cpu_dense.score_gradients

    def counted(*args):
        calls.append(len(calls))
        return original(*args)

    monkeypatch.setattr(cpu_dense, "score_gradients", counted)
    return calls


@pytest.fixture(params=["gathered", "dense"])
def form(request, monkeypatch, dense_calls):
    """Force one form for all calls, and check afterwards that it was used."""
    most_keys = 0 if request.param == "gathered" else 10**9
    monkeypatch.setattr(cpu_dense, "most_keys", lambda heads, topk: most_keys)
    yield request.param
    assert bool(dense_calls) == (request.param == "dense")


@pytest.fixture(params=["whole", "one row", "odd", "pairs"])
def chunks(request, monkeypatch):
    """Set the chunking of the dense form: none, rows of one or several sequences, and few keys."""
    size, fewest, most, step, keys = {
        "whole": (1 << 30, 1, 10**6, 64, 10**6),
        "one row": (1, 1, 128, 1, 16),
        "odd": (1 << 30, 1, 7, 5, 3),
        "pairs": (2 * 11 * 5 * 20 * 8, 11, 11, 5, 20),
    }[request.param]
    monkeypatch.setattr(cpu_chunks, "_CHUNK_BYTES", size)
    monkeypatch.setattr(cpu_chunks, "_FEWEST_ROWS", fewest)
    monkeypatch.setattr(cpu_chunks, "_MOST_ROWS", most)
    monkeypatch.setattr(cpu_chunks, "_WIDTH_STEP", step)
    monkeypatch.setattr(cpu_dense, "_TILE_KEYS", keys)


@pytest.mark.parametrize("use_relu", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_each_form_equals_the_oracle(form, dtype, use_relu):
    operator.test_scores_and_their_gradients("cpu", dtype, use_relu)


def test_every_cut_equals_the_oracle(chunks, form):
    operator.test_scores_and_their_gradients("cpu", torch.float32, True)


def gradients(inputs, indices, grad, backend):
    scores = selected_scores(*inputs, indices, backend=backend)
    return torch.autograd.grad(scores, inputs, grad)


def leaves(batch=3):
    return [x.requires_grad_() for x in indexer_inputs(batch, 40, heads=3, dim=8)]


def test_a_key_that_is_listed_twice_counts_twice_and_others_not_at_all(chunks, form):
    checks.set_debug_checks(False)
    inputs, indices = leaves(), random_indices(3, 40, 40, 12, empty_rows=(4,))
    indices[:, 20:, 3] = indices[:, 20:, 0]
    grad = torch.randn(indices.shape, generator=torch.Generator().manual_seed(1)).masked_fill(indices < 0, 0)
    expected = gradients(inputs, indices, grad, "reference")
    wrong = indices.masked_fill(indices < 0, 2**31 - 1)
    for value, other in zip(gradients(inputs, wrong, grad, "cpu"), expected, strict=True):
        torch.testing.assert_close(value, other, atol=2e-5, rtol=2e-5)


SPOILT = ("query", "a key that no row selects", "weights", "gradient")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e38])
@pytest.mark.parametrize("where", SPOILT)
@pytest.mark.usefixtures("operands_that_are_no_numbers")
def test_what_is_not_finite_reaches_what_depends_on_it_only(where, value, monkeypatch, dense_calls):
    # The dense form would multiply NaN or infinity by zero, so the operator uses the gathered form for such
    # calls.
    inputs, indices = leaves(), random_indices(3, 40, 35, 12, empty_rows=(4,))
    grad = torch.ones(indices.shape).masked_fill(indices < 0, 0)
    with torch.no_grad():
        places = (inputs[0][0, 7], inputs[1][0, 38], inputs[2][0, 7], grad[0, 7, :1])
        spoilt = dict(zip(SPOILT, places, strict=True))
        spoilt[where].fill_(value)
    results = []
    for most_keys in (10**9, 0):
        monkeypatch.setattr(cpu_dense, "most_keys", lambda heads, topk, most_keys=most_keys: most_keys)
        results.append(gradients(inputs, indices, grad, "cpu"))
    assert not dense_calls
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert where != "a key that no row selects" or oracle.relative_error(one, other) < 1e-6


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("run", ["indexer", "selected"])
def test_stale_scratch(form, run, threads, monkeypatch):
    monkeypatch.setattr(cpu_chunks, "_MOST_ROWS", 7)
    test_memory.test_stale_scratch_is_never_read(run, threads, monkeypatch)


@pytest.mark.parametrize("dtype", test_contract.OUTSIDE)
def test_the_contract(form, dtype):
    test_contract.test_indices_outside_of_the_keys_are_no_keys("cpu", dtype)
