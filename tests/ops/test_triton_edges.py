"""The Triton backends at the edges of their contract: invalid indices, NaN, empty inputs."""

from __future__ import annotations

import math

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from mindspeed_dsa.ops import checks
from mindspeed_dsa.ops.indexer_kl_loss import indexer_kl_loss
from mindspeed_dsa.ops.indexer_kl_loss.protocol import DenseCall
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer, selected_scores
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall
from mindspeed_dsa.ops.row_ranges import Ranges
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall
from tests.ops.random_inputs import indexer_inputs, random_indices
from tests.ops.test_sparse_flash_attention import attention_inputs
from tests.ops.test_triton_lightning_indexer import select_from
from tests.ops.triton_backend import DEVICE, attention, indexer, kl_loss

KEYS = 20


def attend(indices):
    query, key_value = attention_inputs(2, 3, KEYS, 5, 24, torch.float32)
    leaves = [x.detach().to(DEVICE).requires_grad_() for x in (query, key_value)]
    out, lse, summed = sparse_flash_attention(
        *leaves, indices, 0.3, value_dim=16, return_attention_sum=True, backend="triton"
    )
    return out, lse, summed, *torch.autograd.grad(out.sin().sum(), leaves)


def score(indices, dtype=torch.float32):
    leaves = [x.to(DEVICE).requires_grad_() for x in indexer_inputs(2, 3, KEYS, dtype=dtype)]
    scores = selected_scores(*leaves, indices, backend="triton")
    gradient = torch.linspace(-1, 1, scores.numel(), device=DEVICE).view_as(scores)
    return scores, *torch.autograd.grad(scores, leaves, gradient)


def lose(indices):
    leaves = [x.to(DEVICE).requires_grad_() for x in indexer_inputs(2, 3, KEYS)]
    main = [x.detach().to(DEVICE) for x in attention_inputs(2, 3, KEYS, 5, 24, torch.float32)]
    loss = indexer_kl_loss(*leaves, *main, indices, 0.3, backend="triton")
    return loss, *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("call", [attend, score, lambda at: score(at, torch.float16), lose])
def test_an_index_outside_of_the_keys_is_like_minus_one(call, deterministic):
    """In the first sequence, such an index would read the second sequence's keys, and write their
    gradient.
    """
    torch.use_deterministic_algorithms(deterministic)
    indices = random_indices(2, 3, KEYS, 12, empty_rows=(2,)).to(DEVICE)
    assert (indices[0, :2] < 0).any()
    wrong = indices.clone()
    wrong[0] = torch.where(indices[0] < 0, KEYS + torch.arange(12, device=DEVICE), indices[0])
    wrong[1] = torch.where(indices[1] < 0, -7, indices[1])
    with pytest.raises(ValueError, match=r"topk_indices must lie in \[-1, 20\), got values from -7 to 31"):
        call(wrong)
    checks.set_debug_checks(False)
    expected = call(indices)
    far = torch.where(indices < 0, 2**32 + 3, indices.long())
    for variant in (wrong, far):
        for value, other in zip(call(variant), expected, strict=True):
            assert torch.isfinite(value).all() or (value == -torch.inf).any()
            assert torch.equal(value, other)


@pytest.mark.parametrize("topk", [3, 300, 690])
def test_nan_is_selected_after_every_number(topk):
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31 - 1, (3, 700), generator=generator).int()
    kind = torch.randint(0, 8, (3, 700), generator=generator)
    # NaN with both signs and any payload, infinities, and many of both.
    bits = torch.where(kind < 3, bits | 0x7FC00001, bits)
    slab = bits.view(torch.float32)
    slab = torch.where(kind == 3, -torch.inf, torch.where(kind == 4, torch.inf, slab)).contiguous()
    assert (slab.isnan() & (bits > 0)).sum() > 300
    assert (slab.isnan() & (bits < 0)).sum() > 300
    starts, ends = torch.tensor([0, 13, 0]).int(), torch.tensor([700, 690, 5]).int()
    indices, scores, _ = select_from(slab, starts, ends, topk)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        values = slab[row].tolist()
        order = sorted(
            range(start, end),
            key=lambda s, v=values: (math.isnan(v[s]), 0.0 if math.isnan(v[s]) else -v[s], s),
        )
        expected = sorted(order[:topk])
        assert indices[row].tolist() == expected + [-1] * (topk - len(expected))
        chosen = slab[row, expected]
        assert torch.equal(scores[row, : len(expected)].nan_to_num(7.0), chosen.nan_to_num(7.0))


@pytest.mark.parametrize("use_relu", [True, False])
@pytest.mark.usefixtures("operands_that_are_no_numbers")
def test_nan_of_the_products_reaches_the_selection_as_in_the_reference(use_relu):
    query, key, weights = indexer_inputs(1, 6, 40)
    key[0, ::3] = torch.nan
    key[0, 1] = -torch.nan
    query[0, 4, 2] = torch.nan
    ends = torch.tensor([3, 40, 17, 0, 40, 39], dtype=torch.int32)
    options = {"ends": ends, "use_relu": use_relu}
    expected = lightning_indexer(query, key, weights, 30, backend="reference", **options)
    inputs = [x.to(DEVICE) for x in (query, key, weights)]
    indices, scores = (x.cpu() for x in lightning_indexer(*inputs, 30, backend="triton", **options))
    assert torch.equal(indices, expected.topk_indices)
    assert torch.equal(scores.isnan(), expected.topk_scores.isnan())
    assert scores.isnan().any()
    torch.testing.assert_close(scores, expected.topk_scores, equal_nan=True)


@pytest.fixture
def launches(monkeypatch):
    """Return the grids of all launches, and check that none is empty."""
    grids = []
    before = InterpretedFunction.__getitem__

    def launch(self, grid):
        grids.append(grid)
        assert all(size > 0 for size in grid), f"{self.fn.__name__} is launched with the grid {grid}"
        return before(self, grid)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", launch)
    return grids


SIZES = [
    pytest.param(0, 3, 5, id="batch"),
    pytest.param(2, 0, 5, id="rows"),
    pytest.param(2, 3, 0, id="keys"),
]


@pytest.mark.skipif(DEVICE != "cpu", reason="watches the interpreter's launches")
@pytest.mark.parametrize(("batch", "rows", "keys"), SIZES)
def test_nothing_is_launched_for_nothing_and_all_is_written(batch, rows, keys, launches):
    """For empty calls the backends return zero gradients and no unwritten memory, which holds NaN here."""
    query, key_value = (x.detach() for x in attention_inputs(batch, rows, keys, 4, 24, torch.float16))
    index = indexer_inputs(batch, rows, keys)
    indices = torch.full((batch, rows, 3), -1, dtype=torch.int32)
    bound = torch.zeros(batch, rows, dtype=torch.int32)
    weights = torch.ones(batch, rows)

    attend, score = AttentionCall(query, key_value, indices, 0.3, 16), IndexerCall(*index)
    ranges = Ranges(bound, bound, False)
    out, lse, summed = attention.forward(attend, True)
    gradients = [*attention.backward(attend, out, out, lse, True)]
    chosen, scores = indexer.select(score, min(3, keys), ranges)
    assert (chosen.shape, scores.shape) == ((batch, rows, min(3, keys)),) * 2
    scores = indexer.scores_at(score, indices)
    gradients += indexer.score_gradients(score, indices, torch.zeros_like(scores))
    target = kl_loss.attention_sum(attend, None)
    loss, gradient = kl_loss.divergence_and_gradient(scores, target, indices >= 0, weights, True)
    call = DenseCall(score, query, key_value, 0.3, ranges, weights)
    dense, of_dense = kl_loss.dense_loss_and_gradients(call, True)

    assert (scores == -torch.inf).all()
    assert (lse == -torch.inf).all()
    for tensor in (out, summed, target, loss, gradient, dense, *gradients, *of_dense):
        assert (tensor == 0).all()
    assert [x.shape for x in gradients[:2]] == [query.shape, key_value.shape]
    assert [x.shape for x in gradients[3:]] == [x.shape for x in index]
    # A row without keys launches kernels; an empty batch or no rows do not.
    assert bool(launches) == (rows * batch > 0)
