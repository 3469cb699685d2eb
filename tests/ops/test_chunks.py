"""What accelerators compute by PyTorch in chunks, cut into many of them."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops import chunks
from mindspeed_dsa.ops.lightning_indexer.reference import visible
from tests.ops import oracle
from tests.ops.cases import DTYPES, indexer_inputs, packed_ranges, random_indices


@pytest.fixture(autouse=True, params=[1, 3000, 1 << 20], ids=["row-by-row", "few-rows", "one-chunk"])
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", request.param)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("use_relu", [True, False])
def test_scores_and_their_gradients(dtype, use_relu):
    inputs = indexer_inputs(2, 23, 60, heads=5, dim=24, dtype=dtype)
    indices = random_indices(2, 23, 60, 12, empty_rows=(4,))
    valid = indices >= 0
    wide = [x.double().requires_grad_() for x in inputs]
    expected = oracle.index_scores(*wide, use_relu).gather(-1, indices.clamp_min(0).long())
    scores = chunks.scores_at(*inputs, indices, use_relu)
    oracle.assert_close(scores[valid], expected[valid].detach())
    assert (scores[~valid] == -torch.inf).all()

    factors = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    # What arrives at the tail does not count.
    grads = chunks.score_gradients(factors.masked_fill(~valid, torch.nan), *inputs, indices, use_relu)
    expected_grads = torch.autograd.grad((expected[valid] * factors[valid]).sum(), wide)
    # The keys' is a sum over rows, which callers may go on adding to.
    kinds = dtype, chunks.wide(dtype), dtype
    for grad, kind, expected_grad in zip(grads, kinds, expected_grads, strict=True):
        assert grad.dtype == kind
        oracle.assert_close(grad, expected_grad, backward=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_lse", [True, False])
def test_attention_sum(dtype, with_lse):
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 23, 6, 40), (2, 60, 40))
    )
    indices = random_indices(2, 23, 60, 12, empty_rows=(4,))
    _, lse, probabilities = oracle.attention(query, key, oracle.selected_mask(indices, 60), 0.2, 40)
    expected = probabilities.sum(2).gather(-1, indices.clamp_min(0).long()).masked_fill(indices < 0, 0)
    before = indices.long().clone()
    summed = chunks.attention_sum(query, key, before, lse.float() if with_lse else None, 0.2)
    assert oracle.relative_error(summed, expected) < 1e-5
    assert torch.equal(before, indices.long())


def test_dense_lse():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 26, 3, 24, generator=generator) for _ in range(2))
    starts, ends = (bound.expand(2, -1) for bound in packed_ranges(11, 1, 14))
    scores = 0.3 * torch.einsum("bshd,bthd->bsht", query.double(), key.double())
    scores = scores.masked_fill(~visible(starts, ends, 26)[:, :, None], -torch.inf)
    assert oracle.relative_error(chunks.dense_lse(query, key, 0.3, starts, ends), scores.logsumexp(-1)) < 1e-6
