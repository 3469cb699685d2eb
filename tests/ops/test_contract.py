"""The contract of every backend for indices out of range, for NaN and for empty calls."""

from __future__ import annotations

import re

import pytest
import torch

from mindspeed_dsa.ops import checks
from mindspeed_dsa.ops.cpu import products
from mindspeed_dsa.ops.indexer_kl_loss import (
    dense_indexer_kl_loss,
    divergence_and_score_gradient,
    indexer_kl_loss,
)
from mindspeed_dsa.ops.indexer_kl_loss import npu as loss_npu
from mindspeed_dsa.ops.lightning_indexer import chunked as indexer
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer, selected_scores
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall
from tests.ops.random_inputs import BACKENDS, indexer_inputs, random_indices

SCALE = 0.3


def main_inputs(batch, rows, keys, heads=3, dim=10):
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(batch, rows, heads, dim, generator=generator)
    return query, torch.randn(batch, keys, dim, generator=generator)


def leaves(batch, rows, keys):
    tensors = (*indexer_inputs(batch, rows, keys), *main_inputs(batch, rows, keys))
    return [x.requires_grad_() for x in tensors]


def everything(inputs, indices, backend):
    """Return all results of the operators that take indices, and the gradients of their inputs."""
    index, main = inputs[:3], inputs[3:]
    scores = selected_scores(*index, indices, backend=backend)
    # Losses and score gradients that the attention backward requests.
    received = []

    def score_gradient(attention_sum):
        received.append(
            divergence_and_score_gradient(scores.detach(), attention_sum, indices, backend=backend)
        )
        return received[-1][1]

    out, lse, attention_sum = sparse_flash_attention(
        *main,
        indices,
        SCALE,
        value_dim=7,
        return_attention_sum=True,
        topk_scores=scores,
        score_gradient=score_gradient,
        backend=backend,
    )
    # The loss forms the attention sum itself, from the forward's lse, or takes it as an argument.
    given = [{}, {"lse": lse}, {"topk_scores": scores, "attention_sum": attention_sum}]
    losses = [indexer_kl_loss(*index, *main, indices, SCALE, backend=backend, **some) for some in given]
    generator = torch.Generator().manual_seed(2)
    factors = torch.randn(out.shape, generator=generator)
    total = (out * factors).sum() + sum(losses)
    grads = torch.autograd.grad(total, inputs, retain_graph=True)
    # An incoming gradient at -1 entries must be ignored; NaN shows if it is not.
    gradient = torch.randn(scores.shape, generator=generator).masked_fill(scores.isneginf(), torch.nan)
    grads += torch.autograd.grad(scores, inputs[:3], gradient)
    # Only the first backward reaches the attention.
    assert len(received) == 1
    return [scores, out, lse, attention_sum, *losses, *received[0], *grads]


# Truncated to 32 bits, some of the int64 values would be valid keys.
OUTSIDE = {
    torch.int32: (40, 41, 10**6, 2**31 - 1, -2, -(2**31)),
    torch.int64: (40, 2**32 + 3, 2**62, -2, -(2**32) + 5, -(2**63)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", OUTSIDE)
def test_indices_outside_of_the_keys_are_no_keys(backend, dtype):
    # Debug checks would refuse the indices before any backend sees them.
    checks.set_debug_checks(False)
    indices = random_indices(2, 23, 40, 30, empty_rows=(3, 8)).to(dtype)
    outside = torch.tensor(OUTSIDE[dtype], dtype=dtype)
    picks = torch.randint(0, len(outside), indices.shape, generator=torch.Generator().manual_seed(1))
    wrong = torch.where(indices < 0, outside[picks], indices)
    # Not only at the tail: in most rows the first entry names no key either.
    without = indices.clone()
    without[:, 5:, 0] = -1
    wrong[:, 5:, 0] = outside[picks[:, 5:, 0]]
    inputs = leaves(2, 23, 40)
    expected = everything(inputs, without, "reference")
    for value, other in zip(everything(inputs, wrong, backend), expected, strict=True):
        assert not value.isnan().any()
        torch.testing.assert_close(value, other, atol=2e-5, rtol=2e-5)
    checks.set_debug_checks(True)
    for call in (
        lambda: selected_scores(*inputs[:3], wrong, backend=backend),
        lambda: sparse_flash_attention(*inputs[3:], wrong, SCALE, value_dim=7, backend=backend),
        lambda: indexer_kl_loss(*inputs, wrong, SCALE, backend=backend),
    ):
        with pytest.raises(ValueError, match=r"topk_indices must lie in \[-1, 40\), got values from"):
            call()


def test_indices_outside_of_the_keys_in_chunks():
    # The PyTorch implementations that NPUs use.
    *inputs, main_query, main_key = (x.detach() for x in leaves(2, 23, 40))
    index = IndexerCall(*inputs)
    indices = random_indices(2, 23, 40, 30, empty_rows=(3,)).long()
    # Truncated to 32 bits, 2^32 + 3 would be key 3.
    wrong = indices.masked_fill(indices < 0, 2**32 + 3)
    gradient = torch.randn(indices.shape).masked_fill(indices < 0, torch.nan)
    for call in (
        lambda at: [indexer.scores_at(index, at)],
        lambda at: [loss_npu.attention_sum(AttentionCall(main_query, main_key, at, SCALE, 7), None)],
        lambda at: indexer.score_gradients(index, at, gradient),
    ):
        for value, expected in zip(call(wrong), call(indices), strict=True):
            assert torch.equal(value, expected)
            assert not value.isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_behind_the_last_are_not_read(backend):
    checks.set_debug_checks(False)
    # The keys are a slice. The rest of the memory is where an out-of-range index would read.
    query, memory = main_inputs(1, 4, 64)
    memory[:, 32:] = torch.nan
    # The slice has 32 keys, so 33 and 40 are out of range.
    indices = torch.tensor([0, 5, 33, 40, -1]).int().expand(1, 4, 5)
    out = sparse_flash_attention(query, memory[:, :32], indices, SCALE, value_dim=7, backend=backend).out
    expected = sparse_flash_attention(
        query, memory[:, :32], indices[..., :2], SCALE, value_dim=7, backend="reference"
    ).out
    torch.testing.assert_close(out, expected)


def scores_to_inputs(scores):
    """Return inputs of one head and one dimension with these index scores, for ``use_relu=False``."""
    rows = scores.shape[0]
    query, weights = scores.new_ones(1, rows, 1, 1), scores.new_ones(1, rows, 1)
    return query, scores[0][None, :, None], weights


NAN, INF = float("nan"), float("inf")
SELECTIONS = {
    "numbers before NaN": ([NAN, 1, -NAN, 3, NAN, 2], 3, [1, 3, 5]),
    "a NaN where there are fewer numbers, the first": ([NAN, 1, -NAN, 3, NAN, 2], 4, [0, 1, 3, 5]),
    "minus infinity is a number": ([NAN, -INF, 1, -INF, -NAN], 3, [1, 2, 3]),
    "a visible key before hidden ones, whatever its score": ([-INF, NAN, -INF, -INF, NAN], 4, [0, 1, 2, 3]),
    "infinity": ([NAN, INF, 1, INF, -INF], 2, [1, 3]),
    "signed zeros": ([-0.0, NAN, 0.0, -0.0, 0.0], 3, [0, 2, 3]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.usefixtures("operands_that_are_no_numbers")
def test_nan_comes_after_every_number(backend, dtype, name):
    scores, topk, expected = SELECTIONS[name]
    scores = torch.tensor(scores, dtype=dtype)
    # Invisible keys on both sides have the highest scores.
    surrounded = torch.cat([scores.new_full((3,), 9), scores, scores.new_full((2,), 9)])[None].expand(4, -1)
    indices, topk_scores = lightning_indexer(
        *scores_to_inputs(surrounded),
        topk,
        starts=torch.full((4,), 3),
        ends=torch.full((4,), 3 + len(scores)),
        use_relu=False,
        backend=backend,
    )
    # The first visible key is at position 3.
    assert indices.tolist() == [[[at + 3 for at in expected]] * 4]
    torch.testing.assert_close(topk_scores[0, 0], scores[expected], equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use_relu", [False, True])
@pytest.mark.usefixtures("operands_that_are_no_numbers")
def test_nan_in_a_key_reaches_its_own_score_only(backend, use_relu):
    query, key, weights = indexer_inputs(2, 30, heads=4, dim=16)
    key[:, 7] = torch.nan
    indices, scores = lightning_indexer(query, key, weights, 9, use_relu=use_relu, backend=backend)
    # Causal rows see key 7 from row 7 on. Row 9 sees nine other keys, so topk 9 no longer needs the NaN.
    visible = torch.arange(30) >= 7
    few = visible & (torch.arange(30) < 9)
    assert torch.equal((indices == 7).any(-1), few.expand(2, 30))
    assert torch.equal(scores.isnan(), indices == 7)
    at = selected_scores(query, key, weights, indices, use_relu=use_relu, backend=backend)
    assert torch.equal(at.isnan(), indices == 7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["sparse", "dense"])
@pytest.mark.usefixtures("operands_that_are_no_numbers")
def test_nan_in_the_loss_is_not_hidden(backend, form):
    inputs = leaves(1, 12, 12)
    inputs[1].data[:, 2] = torch.nan
    if form == "dense":
        loss = dense_indexer_kl_loss(*inputs, SCALE, backend=backend)
    else:
        loss = indexer_kl_loss(*inputs, random_indices(1, 12, 12, 12), SCALE, backend=backend)
    assert loss.isnan()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_without_attention_is_not_hidden(backend):
    # The NaN entry has no attention mass; a product with its zero target must not hide it.
    scores, sums = torch.tensor([[[1.0, NAN, -INF]]]), torch.tensor([[[1.0, 0.0, 0.0]]])
    indices = torch.tensor([[[0, 1, 2]]])
    loss, gradient = divergence_and_score_gradient(scores, sums, indices, backend=backend)
    assert loss.isnan()
    assert gradient[..., :2].isnan().all()


# batch, rows, keys
EMPTY = [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0), (0, 0, 0)]


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_nothing_comes_of_nothing(backend, sizes):
    """Empty calls return empty results or zeros, and zero gradients; fresh memory holds NaN."""
    batch, rows, keys = sizes
    inputs = leaves(*sizes)
    ends = torch.full((batch, rows), keys)
    topk_indices, scores = lightning_indexer(*inputs[:3], 4, ends=ends, backend=backend)
    assert topk_indices.shape == scores.shape == (batch, rows, min(4, keys))
    assert (topk_indices.dtype, scores.dtype) == (torch.int32, torch.float32)
    for indices in (topk_indices, torch.full((batch, rows, 3), -1)):
        scores_at = selected_scores(*inputs[:3], indices, backend=backend)
        assert scores_at.shape == indices.shape
        assert (scores_at == -torch.inf).all()
        called = []

        def score_gradient(attention_sum, called=called):
            called.append(attention_sum)
            return attention_sum

        out, lse, attention_sum = sparse_flash_attention(
            *inputs[3:],
            indices,
            SCALE,
            value_dim=7,
            return_attention_sum=True,
            topk_scores=scores if indices is topk_indices else scores_at,
            score_gradient=score_gradient,
            backend=backend,
        )
        assert out.shape == (batch, rows, 3, 7)
        assert lse.shape == (batch, rows, 3)
        assert attention_sum.shape == indices.shape
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        assert (attention_sum == 0).all()
        losses = [
            indexer_kl_loss(*inputs, indices, SCALE, lse=some, reduction=reduction, backend=backend)
            for some in (None, lse.detach())
            for reduction in ("mean", "sum")
        ]
        losses.append(dense_indexer_kl_loss(*inputs, SCALE, ends=ends, backend=backend))
        assert all(loss.item() == 0 and loss.shape == () for loss in losses)
        for value in (scores.sum(), scores_at.nan_to_num(neginf=0).sum(), out.sum(), *losses):
            for grad in torch.autograd.grad(value, inputs, retain_graph=True, allow_unused=True):
                assert grad is None or (grad == 0).all()
        total = out.sum() + sum(losses) + scores.sum()
        grads = torch.autograd.grad(total, inputs, retain_graph=True)
        assert [grad.shape for grad in grads] == [x.shape for x in inputs]
        assert all((grad == 0).all() for grad in grads)
        assert called


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 0, 0), (2, 5, 3)])
def test_divergence_of_nothing(backend, shape):
    scores, indices = torch.full(shape, -torch.inf), torch.full(shape, -1)
    loss, gradient = divergence_and_score_gradient(scores, torch.zeros(shape), indices, backend=backend)
    assert loss.item() == 0
    assert gradient.shape == shape
    assert (gradient == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranges_that_int32_does_not_hold(backend):
    inputs = indexer_inputs(1, 6)
    whole = lightning_indexer(*inputs, 6, ends=torch.full((6,), 6), backend=backend)
    # Such bounds have to be clamped to the six keys, not truncated to 32 bits.
    for end in (2**31, 2**32, 2**40 + 1):
        result = lightning_indexer(
            *inputs, 6, starts=torch.full((6,), -(2**32) + 2), ends=torch.full((6,), end), backend=backend
        )
        assert torch.equal(result.topk_indices, whole.topk_indices)
    wide = indexer_inputs(1, 6, 300)
    # uint8 holds at most 255.
    narrow = lightning_indexer(*wide, 300, ends=torch.full((6,), 255).byte(), backend=backend)
    assert (narrow.topk_indices[..., :255] >= 0).all()
    assert (narrow.topk_indices[..., 255:] == -1).all()


def shapes(query=(1, 6, 2, 8), key=(1, 6, 8), index_query=(1, 6, 4, 16), index_key=(1, 6, 16)):
    weights = torch.ones(index_query[:3])
    return torch.ones(index_query), torch.ones(index_key), weights, torch.ones(query), torch.ones(key)


NO_HEADS = {
    "no heads": ({"query": (1, 6, 0, 8)}, "query", [1, 6, 0, 8]),
    "no width": ({"query": (1, 6, 2, 0), "key": (1, 6, 0)}, "query", [1, 6, 2, 0]),
    "no index heads": ({"index_query": (1, 6, 0, 16)}, "index_query", [1, 6, 0, 16]),
    "no index width": ({"index_query": (1, 6, 4, 0), "index_key": (1, 6, 0)}, "index_query", [1, 6, 4, 0]),
}


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("case", NO_HEADS)
def test_zero_heads_and_zero_width_are_named(case, backend):
    sizes, name, shape = NO_HEADS[case]
    index_query, index_key, index_weights, query, key = shapes(**sizes)
    index = index_query, index_key, index_weights
    indices = random_indices(1, 6, 6, 3)
    calls = {
        "indexer_kl_loss": [
            lambda: indexer_kl_loss(*index, query, key, indices, SCALE, backend=backend),
            lambda: dense_indexer_kl_loss(*index, query, key, SCALE, backend=backend),
        ]
    }
    if name == "query":
        calls["sparse_flash_attention"] = [
            lambda: sparse_flash_attention(query, key, indices, SCALE, value_dim=4, backend=backend)
        ]
    else:
        calls["lightning_indexer"] = [
            lambda: lightning_indexer(*index, 3, backend=backend),
            lambda: selected_scores(*index, indices, backend=backend),
        ]
    for operator, attempts in calls.items():
        argument = "query" if operator != "indexer_kl_loss" else name
        message = (
            f"{operator}: {argument} must have at least one head, each of at least one dimension, got {shape}"
        )
        for attempt in attempts:
            with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
                attempt()


WRONG_RANKS = {
    "query": (2, r"query must be \[batch, query_length, heads, dim\], got \[1, 6\]"),
    "key": (1, r"key must be \[1, key_length, 8\], got \[1\]"),
    "index_query": (2, r"index_query must be \[1, 6, index_heads, index_dim\], got \[1, 6\]"),
}


@pytest.mark.parametrize("name", WRONG_RANKS)
def test_tensors_with_too_few_axes_are_named(name):
    axes, message = WRONG_RANKS[name]
    names = ("index_query", "index_key", "index_weights", "query", "key")
    tensors = dict(zip(names, shapes(), strict=True))
    tensors[name] = torch.ones(tensors[name].shape[:axes])
    with pytest.raises(ValueError, match=f"^indexer_kl_loss: {message}"):
        indexer_kl_loss(**tensors, topk_indices=random_indices(1, 6, 6, 3), softmax_scale=SCALE)
    with pytest.raises(ValueError, match=f"^indexer_kl_loss: {message}"):
        dense_indexer_kl_loss(**tensors, softmax_scale=SCALE)


def test_both_lists_of_keys_are_equally_long():
    index = indexer_inputs(1, 6, 5)
    with pytest.raises(ValueError, match="index_key has 5 keys and key has 6; both list the same positions"):
        indexer_kl_loss(*index, *main_inputs(1, 6, 6), random_indices(1, 6, 6, 3), SCALE)


def test_one_oneDNN_call_per_product_treats_them_alike(monkeypatch):
    # Products run one by one in oneDNN, for any size.
    monkeypatch.setattr(products, "_LOOP_MIN_FLOPS", 0)
    monkeypatch.setattr(products, "_MKL_IS_FAST", False)
    test_indices_outside_of_the_keys_are_no_keys("cpu", torch.int64)
    checks.set_debug_checks(False)
    for use_relu in (False, True):
        test_nan_in_a_key_reaches_its_own_score_only("cpu", use_relu)
    test_nan_in_the_loss_is_not_hidden("cpu", "dense")
