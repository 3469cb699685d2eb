from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dsa.ops.lightning_indexer import cpu as indexer_cpu
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer, selected_scores
from mindspeed_dsa.ops.lightning_indexer.reference import visible
from tests.ops import oracle
from tests.ops.random_inputs import BACKENDS, DTYPES, indexer_inputs, packed_ranges, tied_inputs
from tests.ops.test_memory import LargestStorage


def best_of(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Return the first ``topk`` keys of a stable descending sort, in ascending order, -1 for invisible
    keys.
    """
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    order = torch.where(values == -torch.inf, scores.shape[-1], order)[..., :topk].sort(-1).values
    return torch.where(order == scores.shape[-1], -1, order).int()


def masked_scores(inputs, starts, ends, use_relu=True):
    scores = oracle.index_scores(*inputs, use_relu)
    return scores.masked_fill(~visible(starts, ends, scores.shape[-1]), -torch.inf)


def causal(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, dtype=torch.int32), torch.arange(1, rows + 1, dtype=torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use_relu", [True, False])
def test_ties_go_to_the_lower_position(backend, use_relu):
    inputs = tied_inputs()
    scores = masked_scores(inputs, *causal(40), use_relu)
    assert (scores.sort(-1).values.diff() == 0).any(-1).float().mean() > 0.8, "the case has few ties"

    result = lightning_indexer(*inputs, 7, use_relu=use_relu, backend=backend)

    assert result.topk_indices.dtype == torch.int32
    assert torch.equal(result.topk_indices, best_of(scores, 7))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_selects_the_highest_scores(backend, dtype):
    # More keys than the CPU backend multiplies at once, so that block borders are crossed.
    inputs = indexer_inputs(1, 40, 2600, heads=16, dim=32, dtype=dtype)
    ends = torch.linspace(1, 2600, 40).int()
    scores = masked_scores(inputs, torch.zeros(40, dtype=torch.int32), ends)

    result = lightning_indexer(*inputs, 50, ends=ends, backend=backend)

    best = scores.topk(51).values
    chosen_scores = result.topk_scores.double().sort(descending=True).values
    seen = best[..., :50] > -torch.inf
    assert torch.equal(chosen_scores > -torch.inf, seen)
    assert oracle.relative_error(chosen_scores[seen], best[..., :50][seen]) < 1e-6
    apart = best[..., 49] - best[..., 50] > 1e-4
    assert apart.float().mean() > 0.5
    assert torch.equal(result.topk_indices[apart], best_of(scores, 50)[apart])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_see_their_range_only(backend):
    inputs = indexer_inputs(2, 50)
    starts, ends = packed_ranges(13, 1, 36)
    ends[20] = starts[20]
    scores = masked_scores(inputs, starts, ends)

    result = lightning_indexer(*inputs, 9, starts=starts, ends=ends, backend=backend)

    assert torch.equal(result.topk_indices, best_of(scores, 9))
    assert (result.topk_indices[:, 20] == -1).all()
    assert (result.topk_scores[:, 20] == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_context_parallel_rows_equal_the_whole(backend):
    inputs = indexer_inputs(1, 64)
    whole = lightning_indexer(*inputs, 8, backend=backend)
    # Rank 1 of 4 in zigzag order: chunks 1 and 6 of 8, all keys.
    rows = torch.cat([torch.arange(8, 16), torch.arange(48, 56)])
    part = lightning_indexer(
        inputs.query[:, rows], inputs.key, inputs.weights[:, rows], 8, ends=rows + 1, backend=backend
    )
    assert torch.equal(part.topk_indices, whole.topk_indices[:, rows])


@pytest.mark.parametrize("backend", BACKENDS)
def test_takes_every_visible_key_when_topk_is_large(backend):
    inputs = indexer_inputs(1, 20)
    indices = lightning_indexer(*inputs, 512, backend=backend).topk_indices
    expected = torch.arange(20).expand(20, 20).tril() - torch.ones(20, 20).triu(1)
    assert torch.equal(indices[0], expected.int())


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_inputs_give_the_same_bits(backend):
    inputs = indexer_inputs(1, 70, heads=8, dim=64)
    first, second = (lightning_indexer(*inputs, 16, backend=backend) for _ in range(2))
    assert torch.equal(first.topk_indices, second.topk_indices)
    assert torch.equal(first.topk_scores, second.topk_scores)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use_relu", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_scores_and_their_gradients(backend, dtype, use_relu):
    inputs = [x.requires_grad_() for x in indexer_inputs(2, 45, heads=5, dim=24, dtype=dtype)]
    starts, ends = packed_ranges(20, 25)
    ends[3] = starts[3]
    indices, scores = lightning_indexer(
        *inputs, 12, starts=starts, ends=ends, use_relu=use_relu, backend=backend
    )
    factors = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    valid = indices >= 0
    expected_inputs = [x.detach().double().requires_grad_() for x in inputs]
    expected = oracle.index_scores(*expected_inputs, use_relu).gather(-1, indices.clamp_min(0).long())

    oracle.assert_close(scores[valid], expected[valid])
    grads = torch.autograd.grad((scores[valid] * factors[valid]).sum(), inputs)
    expected_grads = torch.autograd.grad((expected[valid] * factors[valid]).sum(), expected_inputs)
    for grad, expected_grad, tensor in zip(grads, expected_grads, inputs, strict=True):
        assert grad.dtype == tensor.dtype
        oracle.assert_close(grad, expected_grad, backward=True)

    scores_at = selected_scores(*inputs, indices, use_relu=use_relu, backend=backend)
    oracle.assert_close(scores_at[valid], expected[valid])
    assert (scores_at[~valid] == -torch.inf).all()
    for grad, expected_grad in zip(
        torch.autograd.grad((scores_at[valid] * factors[valid]).sum(), inputs), expected_grads, strict=True
    ):
        oracle.assert_close(grad, expected_grad, backward=True)


def test_strided_inputs_in_megatron_layout():
    inputs = indexer_inputs(2, 30)
    # [sequence, batch, ...] memory seen as [batch, sequence, ...]
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    assert not strided[0].is_contiguous()
    expected = lightning_indexer(*inputs, 6, backend="cpu")
    result = lightning_indexer(*strided, 6, backend="cpu")
    assert torch.equal(result.topk_indices, expected.topk_indices)
    assert torch.equal(result.topk_scores, expected.topk_scores)


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.full), 16])
@pytest.mark.parametrize(("backend", "least", "most"), [("cpu", 0, 4.1), ("reference", 15, 17)])
def test_nothing_of_size_length_squared_is_held(backend, least, most, threads, monkeypatch):
    """Four times the length takes at most four times the memory; the reference, which is dense, sixteen
    times.
    """

    def one_after_the_other(items, work, workers):
        return [work(items[first::workers]) for first in range(workers)]

    # Work stays in this thread, where the mode sees it; minimal slabs do not hide growth.
    monkeypatch.setattr(indexer_cpu, "share_out", one_after_the_other)
    monkeypatch.setattr(indexer_cpu, "_PRODUCT_ELEMENTS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    largest = []
    try:
        for length in (512, 2048):
            inputs = indexer_inputs(1, length, heads=2, dim=8)
            with LargestStorage() as seen:
                lightning_indexer(*inputs, 16, backend=backend)
            largest.append(seen.bytes)
    finally:
        torch.set_num_threads(before)
    assert least * largest[0] <= largest[1] <= most * largest[0]


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 2),
    rows=st.integers(1, 40),
    keys=st.integers(1, 300),
    heads=st.integers(1, 5),
    dim=st.sampled_from([1, 3, 8, 16]),
    topk=st.integers(1, 310),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_range(batch, rows, keys, heads, dim, topk, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randint(-2, 3, shape, generator=generator).float()
        for shape in ((batch, rows, heads, dim), (batch, keys, dim), (batch, rows, heads))
    ]
    starts, ends = torch.randint(0, keys + 1, (2, batch, rows), generator=generator, dtype=torch.int32)
    expected = best_of(masked_scores(inputs, starts, ends), topk)
    result = lightning_indexer(*inputs, topk, starts=starts, ends=ends, backend="cpu")
    assert torch.equal(result.topk_indices, expected)


def test_bad_input_is_refused():
    query, key, weights = indexer_inputs(1, 10)
    with pytest.raises(ValueError, match=r"key must be \[1, key_length, 16\]"):
        lightning_indexer(query, key[..., :8], weights, 4)
    with pytest.raises(ValueError, match="dtype and device of query"):
        lightning_indexer(query, key.bfloat16(), weights, 4)
    with pytest.raises(ValueError, match="pass ends"):
        lightning_indexer(query, key[:, :5], weights, 4)
    with pytest.raises(ValueError, match="topk must be at least 1"):
        lightning_indexer(query, key, weights, 0)
    with pytest.raises(ValueError, match="starts must be integers"):
        lightning_indexer(query, key, weights, 4, starts=torch.zeros(3, dtype=torch.int32))
