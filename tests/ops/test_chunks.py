"""Chunked PyTorch implementations for accelerators, cut into many chunks."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops import chunks, precision
from mindspeed_dsa.ops.indexer_kl_loss import npu
from mindspeed_dsa.ops.indexer_kl_loss.protocol import DenseCall
from mindspeed_dsa.ops.lightning_indexer import chunked as indexer
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall
from mindspeed_dsa.ops.lightning_indexer.reference import visible
from mindspeed_dsa.ops.row_ranges import Ranges
from mindspeed_dsa.ops.sparse_flash_attention import chunked as attention
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall
from tests.ops import oracle
from tests.ops.random_inputs import DTYPES, indexer_inputs, packed_ranges, random_indices


@pytest.fixture(autouse=True, params=[1, 3000, 1 << 20], ids=["row-by-row", "few-rows", "one-chunk"])
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", request.param)
    monkeypatch.setattr(npu, "_LSE_BYTES", request.param)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("use_relu", [True, False])
def test_scores_and_their_gradients(dtype, use_relu):
    inputs = indexer_inputs(2, 23, 60, heads=5, dim=24, dtype=dtype)
    indices = random_indices(2, 23, 60, 12, empty_rows=(4,))
    valid = indices >= 0
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = oracle.index_scores(*wide, use_relu).gather(-1, indices.clamp_min(0).long())
    call = IndexerCall(*inputs, use_relu)
    scores = indexer.scores_at(call, indices)
    oracle.assert_close(scores[valid], expected[valid].detach())
    assert (scores[~valid] == -torch.inf).all()

    factors = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    # Incoming gradients at the -1 tail must be ignored.
    grads = indexer.score_gradients(call, indices, factors.masked_fill(~valid, torch.nan))
    expected_grads = torch.autograd.grad((expected[valid] * factors[valid]).sum(), wide)
    # Keys get the wide dtype: their gradient is a sum over rows that callers may add to.
    kinds = dtype, precision.wide(dtype), dtype
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
    call = AttentionCall(query, key, before, 0.2, 40)
    summed = attention.attention_sum(call, lse.float() if with_lse else None)
    assert oracle.relative_error(summed, expected) < 1e-5
    assert torch.equal(before, indices.long())


def test_dense_lse():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 26, 3, 24, generator=generator) for _ in range(2))
    starts, ends = (bound.expand(2, -1) for bound in packed_ranges(11, 1, 14))
    scores = 0.3 * torch.einsum("bshd,bthd->bsht", query.double(), key.double())
    scores = scores.masked_fill(~visible(starts, ends, 26)[:, :, None], -torch.inf)
    index = IndexerCall(query, key[:, :, 0], query[..., 0])
    call = DenseCall(index, query, key, 0.3, Ranges(starts, ends, False), query[..., 0, 0])
    assert oracle.relative_error(npu.dense_lse(call), scores.logsumexp(-1)) < 1e-6
