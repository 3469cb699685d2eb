"""The indexer loss formed inside the attention backward equals the loss from the forward's attention sum."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_dsa.ops.indexer_kl_loss import divergence_and_score_gradient, indexer_kl_loss
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.ops import oracle
from tests.ops.random_inputs import BACKENDS, DTYPES, indexer_inputs, packed_ranges

SCALE = 0.2
ROWS = 37


class Case:
    """Leaves of an indexer and an attention, and both ways to compute the loss."""

    def __init__(self, backend, dtype=torch.float32, reduction="mean"):
        self.starts, self.ends = packed_ranges(11, 26)
        self.ends[5] = self.starts[5]
        generator = torch.Generator().manual_seed(5)
        main = [
            torch.randn(2, ROWS, 6, 40, generator=generator),
            torch.randn(2, ROWS, 40, generator=generator),
        ]
        self.index = [x.requires_grad_() for x in indexer_inputs(2, ROWS, dtype=dtype)]
        self.main = [x.to(dtype).requires_grad_() for x in main]
        self.row_mask = torch.ones(2, ROWS, dtype=torch.bool)
        self.row_mask[0, 9:12] = False
        self.options = {"row_mask": self.row_mask, "reduction": reduction, "backend": backend}
        self.backend = backend
        self.losses = []

    @property
    def leaves(self):
        return [*self.index, *self.main]

    def select(self):
        return lightning_indexer(*self.index, 8, starts=self.starts, ends=self.ends, backend=self.backend)

    def attend(self, indices, **keywords):
        return sparse_flash_attention(
            *self.main, indices, SCALE, value_dim=32, backend=self.backend, **keywords
        )

    def from_the_forward(self):
        """Return the loss, and the gradients of ``sum of sin(out) + loss``."""
        indices, scores = self.select()
        out, _, attention_sum = self.attend(indices, return_attention_sum=True)
        loss = indexer_kl_loss(
            *self.index,
            *self.main,
            indices,
            SCALE,
            topk_scores=scores,
            attention_sum=attention_sum,
            **self.options,
        )
        return loss.detach(), torch.autograd.grad(out.sin().sum() + loss, self.leaves)

    def score_gradient(self, scores, indices):
        def hook(attention_sum):
            assert not torch.is_grad_enabled()
            loss, gradient = divergence_and_score_gradient(
                scores.detach(), attention_sum, indices, **self.options
            )
            self.losses.append(loss)
            return gradient

        return hook

    def hooked(self):
        indices, scores = self.select()
        out, _, attention_sum = self.attend(
            indices, topk_scores=scores, score_gradient=self.score_gradient(scores, indices)
        )
        assert attention_sum is None
        return out

    def check(self, loss, grads, expected_loss, expected_grads):
        assert abs(loss - expected_loss) < 1e-6 * max(1, abs(expected_loss))
        for leaf, grad, expected in zip(self.leaves, grads, expected_grads, strict=True):
            assert expected.abs().max() > 0
            assert grad.dtype == leaf.dtype
            assert oracle.relative_error(grad, expected) < (5e-3 if leaf.dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_the_loss_from_the_forward(backend, dtype, reduction):
    case = Case(backend, dtype, reduction)
    expected = case.from_the_forward()
    grads = torch.autograd.grad(case.hooked().sin().sum(), case.leaves)
    (loss,) = case.losses
    case.check(loss, grads, *expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backward_calls_once(backend):
    case = Case(backend)
    expected = case.from_the_forward()
    out = case.hooked().sin().sum()
    assert case.losses == []
    for calls in (1, 2):
        grads = torch.autograd.grad(out, case.leaves, retain_graph=True)
        assert len(case.losses) == calls
        case.check(case.losses[-1], grads, *expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backwards_that_do_not_reach_the_scores_do_not_call(backend):
    # A callback may reduce over ranks and log, so a backward for other leaves must not call it.
    case = Case(backend)
    expected = case.from_the_forward()
    out = case.hooked().sin().sum()
    (grad,) = torch.autograd.grad(out, case.main[1], retain_graph=True)
    assert case.losses == []
    assert oracle.relative_error(grad, expected[1][4]) < 1e-6
    grads = torch.autograd.grad(out, case.leaves)
    assert len(case.losses) == 1
    case.check(case.losses[0], grads, *expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_callback_may_overwrite_the_sum(backend):
    case = Case(backend)
    expected = case.from_the_forward()
    indices, scores = case.select()
    hook = case.score_gradient(scores, indices)

    def overwriting(attention_sum):
        gradient = hook(attention_sum)
        attention_sum.fill_(torch.nan)
        return gradient

    out = case.attend(indices, topk_scores=scores, score_gradient=overwriting).out.sin().sum()
    for _ in range(2):
        grads = torch.autograd.grad(out, case.leaves, retain_graph=True)
        case.check(case.losses[-1], grads, *expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False], ids=["indexer-and-attention", "attention-alone"])
def test_recomputed_forwards_do_not_call(backend, use_reentrant, whole):
    case = Case(backend)
    expected = case.from_the_forward()

    def layer(*leaves):
        case.index, case.main = list(leaves[:3]), list(leaves[3:])
        return case.hooked()

    def attention(query, key_value, scores, indices):
        hook = case.score_gradient(scores, indices)
        return sparse_flash_attention(
            query,
            key_value,
            indices,
            SCALE,
            value_dim=32,
            backend=backend,
            topk_scores=scores,
            score_gradient=hook,
        ).out

    leaves = case.leaves
    run = partial(checkpoint, use_reentrant=use_reentrant)
    if whole:
        out = run(layer, *leaves)
    else:
        indices, scores = case.select()
        out = run(attention, *case.main, scores, indices)
    out.sin().sum().backward()

    (loss,) = case.losses
    case.index, case.main = leaves[:3], leaves[3:]
    case.check(loss, [leaf.grad for leaf in leaves], *expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_parts(backend):
    """A frozen indexer needs no attention sum; a frozen attention still trains its indexer."""
    case = Case(backend)
    _, expected = case.from_the_forward()
    indices, scores = case.select()
    hook = case.score_gradient(scores, indices)
    out = case.attend(indices, topk_scores=scores.detach(), score_gradient=hook).out
    for grad, other in zip(torch.autograd.grad(out.sin().sum(), case.main), expected[3:], strict=True):
        assert oracle.relative_error(grad, other) < 1e-6
    assert case.losses == []

    with torch.no_grad():
        assert not case.attend(indices, topk_scores=scores, score_gradient=hook).out.requires_grad

    case.main = [x.detach() for x in case.main]
    out = case.hooked()
    for grad, other in zip(torch.autograd.grad(out.sin().sum(), case.index), expected[:3], strict=True):
        assert oracle.relative_error(grad, other) < 1e-6
    assert len(case.losses) == 1


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_without_gradient_still_trains_the_indexer(backend):
    case = Case(backend)
    _, expected = case.from_the_forward()
    grads = torch.autograd.grad(_NoGradient.apply(case.hooked()).sum(), case.index)
    for grad, other in zip(grads, expected[:3], strict=True):
        assert oracle.relative_error(grad, other) < 1e-6


def test_the_cpu_backward_recomputes_the_sum():
    """The forward computes no attention sum, so none is saved between forward and backward."""
    case = Case("cpu")
    indices, scores = case.select()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        case.attend(indices, topk_scores=scores, score_gradient=case.score_gradient(scores, indices))
    assert kept
    assert not [x for x in kept if x.shape == indices.shape and x.is_floating_point()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_hooks_are_refused(backend):
    case = Case(backend)
    indices, scores = case.select()
    with pytest.raises(ValueError, match="topk_scores and score_gradient go together"):
        case.attend(indices, topk_scores=scores)
    with pytest.raises(ValueError, match="topk_scores and score_gradient go together"):
        case.attend(indices, score_gradient=torch.clone)
    with pytest.raises(ValueError, match="topk_scores must be as large as topk_indices"):
        case.attend(indices, topk_scores=scores[..., :4], score_gradient=torch.clone)
    out = case.attend(indices, topk_scores=scores, score_gradient=lambda attention: attention[..., :4]).out
    with pytest.raises(ValueError, match="what score_gradient returned must be"):
        out.sum().backward()
    with pytest.raises(ValueError, match="no backend is called 'gpu'"):
        divergence_and_score_gradient(scores, scores, indices, backend="gpu")
    with pytest.raises(ValueError, match="attention_sum must be"):
        divergence_and_score_gradient(scores, scores[:, 1:], indices)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_sum_given_is_not_changed(backend):
    case = Case(backend)
    indices, scores = case.select()
    attention_sum = torch.rand(indices.shape).masked_fill(indices < 0, 0)
    before = attention_sum.clone()
    divergence_and_score_gradient(scores, attention_sum, indices, **case.options)
    assert torch.equal(attention_sum, before)
