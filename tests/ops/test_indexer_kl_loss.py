from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.indexer_kl_loss import cpu, dense_indexer_kl_loss, indexer_kl_loss
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.lightning_indexer.reference import visible
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.ops import oracle
from tests.ops.random_inputs import BACKENDS, DTYPES, indexer_inputs, packed_ranges, random_indices

SCALE = 0.2


def main_inputs(batch, rows, heads, dim, dtype=torch.float32, per_head=False, keys=None):
    generator = torch.Generator().manual_seed(5)
    keys = rows if keys is None else keys
    key_shape = (batch, keys, heads, dim) if per_head else (batch, keys, dim)
    return (
        torch.randn(batch, rows, heads, dim, generator=generator).to(dtype),
        torch.randn(key_shape, generator=generator).to(dtype),
    )


def expected_loss(index_inputs, query, key, mask, row_mask, reduction, use_relu=True):
    """Return the loss and its gradients, in fp64."""
    leaves = [x.detach().double().requires_grad_() for x in index_inputs]
    per_head = key if key.dim() == 4 else key[:, :, None].expand(-1, -1, query.shape[2], -1)
    scores = SCALE * torch.einsum("bshd,bthd->bsht", query.double(), per_head.double())
    # Rows without keys have NaN probabilities.
    probabilities = scores.masked_fill(~mask[:, :, None], -torch.inf).softmax(-1).nan_to_num(0)
    per_row = oracle.divergence(oracle.index_scores(*leaves, use_relu), probabilities, mask)
    if row_mask is not None:
        per_row = per_row * row_mask
    count = per_row.numel() if row_mask is None else row_mask.sum()
    loss = per_row.sum() / (count if reduction == "mean" else 1)
    return loss, torch.autograd.grad(loss, leaves)


def check(loss, inputs, expected, expected_grads):
    assert abs(loss.item() - expected.item()) < 2e-5 * max(1, abs(expected.item()))
    # A factor of 3 shows that the incoming gradient is used.
    for grad, expected_grad in zip(torch.autograd.grad(3 * loss, inputs), expected_grads, strict=True):
        oracle.assert_close(grad, 3 * expected_grad, backward=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("given", ["nothing", "lse", "scores-and-sum"])
def test_sparse_form(backend, dtype, reduction, given):
    starts, ends = packed_ranges(11, 26)
    # Row 5 sees no key.
    ends[5] = starts[5]
    inputs = [x.requires_grad_() for x in indexer_inputs(2, 37, dtype=dtype)]
    query, key = main_inputs(2, 37, 6, 40, dtype)
    indices, scores = lightning_indexer(*inputs, 8, starts=starts, ends=ends, backend=backend)
    attention = sparse_flash_attention(
        query, key, indices, SCALE, value_dim=32, return_attention_sum=True, backend=backend
    )
    extra = {
        "nothing": {},
        "lse": {"lse": attention.lse},
        "scores-and-sum": {"topk_scores": scores, "attention_sum": attention.attention_sum},
    }[given]
    row_mask = torch.ones(2, 37, dtype=torch.bool)
    # Rows without loss in the first sequence only.
    row_mask[0, 9:12] = False

    loss = indexer_kl_loss(
        *inputs, query, key, indices, SCALE, row_mask=row_mask, reduction=reduction, backend=backend, **extra
    )

    mask = oracle.selected_mask(indices, 37)
    check(loss, inputs, *expected_loss(inputs, query, key, mask, row_mask, reduction))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("use_relu", [True, False])
def test_dense_form(backend, dtype, per_head, use_relu):
    starts, ends = packed_ranges(15, 1, 24)
    # Row 6 sees no key.
    ends[6] = starts[6]
    inputs = [x.requires_grad_() for x in indexer_inputs(2, 40, dtype=dtype)]
    query, key = main_inputs(2, 40, 6, 24, dtype, per_head)
    row_mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(3)) < 0.8

    loss = dense_indexer_kl_loss(
        *inputs,
        query,
        key,
        SCALE,
        starts=starts,
        ends=ends,
        row_mask=row_mask,
        use_relu=use_relu,
        backend=backend,
    )

    mask = visible(starts.expand(2, -1), ends.expand(2, -1), 40)
    check(loss, inputs, *expected_loss(inputs, query, key, mask, row_mask, "mean", use_relu))


def test_dense_form_over_many_blocks(monkeypatch):
    # Few scores per block, so that 60 x 60 of them take several blocks.
    monkeypatch.setattr(cpu, "_DENSE_BLOCK", 1000)
    inputs = [x.requires_grad_() for x in indexer_inputs(1, 60)]
    query, key = main_inputs(1, 60, 6, 24)
    loss = dense_indexer_kl_loss(*inputs, query, key, SCALE, backend="cpu")
    mask = torch.ones(1, 60, 60).tril().bool()
    check(loss, inputs, *expected_loss(inputs, query, key, mask, None, "mean"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_form_over_all_keys_equals_dense_form(backend):
    inputs = [x.requires_grad_() for x in indexer_inputs(1, 30)]
    query, key = main_inputs(1, 30, 4, 24)
    indices, scores = lightning_indexer(*inputs, 30, backend=backend)
    sparse = indexer_kl_loss(*inputs, query, key, indices, SCALE, topk_scores=scores, backend=backend)
    dense = dense_indexer_kl_loss(*inputs, query, key, SCALE, backend=backend)
    assert abs(sparse.item() - dense.item()) < 1e-6
    for one, other in zip(
        torch.autograd.grad(sparse, inputs), torch.autograd.grad(dense, inputs), strict=True
    ):
        assert oracle.relative_error(one, other) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_finite_differences(backend, form):
    """In fp64 on a tiny shape, the gradient agrees with finite differences of the returned loss."""
    inputs = [x.double().requires_grad_() for x in indexer_inputs(1, 6, heads=2, dim=3, seed=4)]
    query, key = (x.double() for x in main_inputs(1, 6, 2, 5))
    # Row 2 is empty.
    indices = random_indices(1, 6, 6, 4, empty_rows=(2,))

    def loss(*leaves):
        if form == "dense":
            return dense_indexer_kl_loss(*leaves, query, key, SCALE, backend=backend)
        return indexer_kl_loss(*leaves, query, key, indices, SCALE, backend=backend)

    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_where_the_indexer_is_already_right(backend):
    query, key = main_inputs(1, 20, 4, 16)
    indices = random_indices(1, 20, 20, 7)
    target = sparse_flash_attention(query, key, indices, SCALE, value_dim=16, return_attention_sum=True)
    inputs = indexer_inputs(1, 20)
    # Scores whose softmax is the target: the log of the mean over 4 heads.
    scores = (target.attention_sum / 4).log().requires_grad_()
    loss = indexer_kl_loss(
        *inputs,
        query,
        key,
        indices,
        SCALE,
        topk_scores=scores,
        attention_sum=target.attention_sum,
        backend=backend,
    )
    assert abs(loss.item()) < 1e-6
    (grad,) = torch.autograd.grad(loss, scores)
    assert grad.nan_to_num(1).abs().max() < 1e-7


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_the_score_gradient_sum_to_zero_and_main_attention_gets_none(backend):
    inputs = indexer_inputs(1, 25)
    query, key = (x.requires_grad_() for x in main_inputs(1, 25, 4, 16))
    indices, scores = lightning_indexer(*[x.requires_grad_() for x in inputs], 6, backend=backend)
    scores.retain_grad()
    loss = indexer_kl_loss(*inputs, query, key, indices, SCALE, topk_scores=scores, backend=backend)
    loss.backward()
    assert scores.grad.abs().max() > 1e-4
    assert scores.grad.sum(-1).abs().max() < 1e-7
    assert query.grad is None
    assert key.grad is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_row_counts(backend):
    inputs = [x.requires_grad_() for x in indexer_inputs(1, 8)]
    query, key = main_inputs(1, 8, 2, 16)
    nothing = torch.zeros(1, 8, dtype=torch.bool)
    loss = dense_indexer_kl_loss(*inputs, query, key, SCALE, row_mask=nothing, backend=backend)
    assert loss.item() == 0
    assert all((grad == 0).all() for grad in torch.autograd.grad(loss, inputs))


def test_sharp_attention_stays_finite():
    """The loss stays finite for scores so large that most probabilities underflow to zero."""
    inputs = [x.requires_grad_() for x in indexer_inputs(1, 30)]
    query, key = main_inputs(1, 30, 4, 16)
    indices, scores = lightning_indexer(*(100 * x for x in inputs), 12, backend="cpu")
    loss = indexer_kl_loss(*inputs, 100 * query, 100 * key, indices, SCALE, topk_scores=scores, backend="cpu")
    assert torch.isfinite(loss)
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(loss, inputs))


def test_bad_input_is_refused():
    inputs = indexer_inputs(1, 8)
    query, key = main_inputs(1, 8, 2, 16)
    indices = random_indices(1, 8, 8, 4)
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum'"):
        indexer_kl_loss(*inputs, query, key, indices, SCALE, reduction="none")
    with pytest.raises(ValueError, match="row_mask must be bool"):
        indexer_kl_loss(*inputs, query, key, indices, SCALE, row_mask=torch.ones(1, 8))
    with pytest.raises(ValueError, match="both list the same positions"):
        dense_indexer_kl_loss(*inputs, query, key[:, :5], SCALE, ends=torch.ones(8, dtype=torch.int32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index_dtype", [torch.float64, torch.float32])
def test_dtype_is_that_of_the_indexer(backend, index_dtype):
    """The loss has the indexer's dtype when the main attention has another; an empty row adds nothing."""
    main_dtype = torch.float32 if index_dtype == torch.float64 else torch.float64
    starts, ends = packed_ranges(11, 26)
    ends[5] = starts[5]
    inputs = [x.requires_grad_() for x in indexer_inputs(2, 37, dtype=index_dtype)]
    query, key = main_inputs(2, 37, 6, 40, main_dtype)
    indices = lightning_indexer(*inputs, 8, starts=starts, ends=ends, backend=backend).topk_indices
    losses = {
        oracle.selected_mask(indices, 37): indexer_kl_loss(
            *inputs, query, key, indices, SCALE, backend=backend
        ),
        visible(*(x.expand(2, 37) for x in (starts, ends)), 37): dense_indexer_kl_loss(
            *inputs, query, key, SCALE, starts=starts, ends=ends, backend=backend
        ),
    }
    for mask, loss in losses.items():
        assert loss.dtype == index_dtype
        expected, expected_grads = expected_loss(inputs, query, key, mask, None, "mean")
        # fp32 accuracy, because either the indexer or the main attention is in fp32.
        assert oracle.relative_error(loss.detach(), expected.detach()) < 1e-5
        for grad, expected_grad in zip(torch.autograd.grad(loss, inputs), expected_grads, strict=True):
            assert grad.dtype == index_dtype
            assert oracle.relative_error(grad, expected_grad) < 1e-5
