"""Memory layouts change nothing: slices, permuted and expanded tensors, int32 and int64 indices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mindspeed_dsa.ops.cpu import products as cpu_products
from mindspeed_dsa.ops.indexer_kl_loss import (
    dense_indexer_kl_loss,
    divergence_and_score_gradient,
    indexer_kl_loss,
)
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer, selected_scores
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.ops.random_inputs import indexer_inputs, random_indices

SEEDS = range(12)
BATCH, ROWS, KEYS, HEADS, DIM = 2, 19, 90, 5, 12


def sliced(tensor: Tensor) -> Tensor:
    """Return a copy inside of a larger tensor, whose other entries must not be read."""
    # 77 shows in results if it is read.
    around = torch.full([size + 3 for size in tensor.shape], 77, dtype=tensor.dtype)
    part = around[tuple(slice(1, 1 + size) for size in tensor.shape)]
    return part.copy_(tensor)


def permuted(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return the same tensor with its axes in another order in memory."""
    order = torch.randperm(tensor.dim(), generator=generator).tolist()
    back = [order.index(axis) for axis in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(back)


def expanded(tensor: Tensor, axis: int) -> Tensor:
    """Return a tensor of the first entry along an axis, expanded with stride 0."""
    return tensor.narrow(axis, 0, 1).expand_as(tensor)


def any_layout(tensor: Tensor, generator: torch.Generator, expandable: tuple[int, ...] = (0, 1)) -> Tensor:
    kind = int(torch.randint(0, 5 if expandable else 4, (), generator=generator))
    if kind == 0 or tensor.dim() == 0:
        return tensor.contiguous()
    if kind == 1:
        return sliced(tensor)
    if kind == 2:
        return permuted(tensor, generator)
    if kind == 3:
        # Every second entry along the last axis: stride 2.
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]
    return expanded(tensor, expandable[int(torch.randint(0, len(expandable), (), generator=generator))])


class Case:
    """One set of arguments in random layouts, and the same values in contiguous tensors."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        # topk is rounded up to multiples of 64: less, equal and more.
        topk = (7, 64, 80)[seed % 3]
        # Small integers give exact scores, so all backends break ties alike.
        index = [x.round() for x in indexer_inputs(BATCH, ROWS, KEYS, heads=3, dim=8, seed=seed)]
        indices = random_indices(BATCH, ROWS, KEYS, topk, seed, empty_rows=(4,))
        if seed % 2:
            # Only the tail is -1, and operators cut it off.
            indices[..., topk // 2 :] = -1
        if seed % 5 == 4:
            # No -1 at all, in random order.
            indices = torch.rand(BATCH, ROWS, KEYS, generator=self.generator).argsort(-1)[..., :topk].int()
        self.index = [self.lay(x) for x in index]
        self.query = self.lay(torch.randn(BATCH, ROWS, HEADS, DIM, generator=self.generator), (0, 1, 2))
        self.key = self.lay(torch.randn(BATCH, KEYS, DIM, generator=self.generator))
        self.per_head = self.lay(torch.randn(BATCH, KEYS, HEADS, DIM, generator=self.generator), (0, 2))
        self.indices = self.lay(indices.long() if seed % 4 < 2 else indices)
        self.scores = self.lay(torch.randn(indices.shape, generator=self.generator))
        sums = torch.rand(indices.shape, generator=self.generator)
        # Never expanded, because the sums must be zero at each row's -1 entries.
        self.sums = self.lay(sums.masked_fill(self.indices < 0, 0), ())
        self.mask = self.lay(torch.rand(BATCH, ROWS, generator=self.generator) < 0.7)
        self.ends = self.lay(torch.randint(1, KEYS + 1, (BATCH, ROWS), generator=self.generator))
        self.starts = self.ends // 3

    def lay(self, tensor: Tensor, expandable: tuple[int, ...] = (0, 1)) -> Tensor:
        return any_layout(tensor, self.generator, expandable)

    def gradient(self, tensor: Tensor) -> Tensor:
        factors = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)).to(tensor.dtype)
        return any_layout(factors, self.generator)


def select(case, index, query, key, per_head, scores, sums, backend):
    chosen, at = lightning_indexer(*index, 33, starts=case.starts, ends=case.ends, backend=backend)
    # Scores at -1 entries are -inf, and -inf minus -inf would be NaN in the comparison.
    return [at.masked_fill(chosen < 0, 0), chosen]


def score(case, index, query, key, per_head, scores, sums, backend):
    return [selected_scores(*index, case.indices, backend=backend).masked_fill(case.indices < 0, 0)]


def attend(case, index, query, key, per_head, scores, sums, backend):
    out, lse, attention_sum = sparse_flash_attention(
        query,
        key,
        case.indices,
        0.3,
        value_dim=9,
        return_attention_sum=True,
        topk_scores=scores,
        score_gradient=lambda attention_sum: attention_sum * case.sums,
        backend=backend,
    )
    return [out, lse.nan_to_num(neginf=0), attention_sum]


def sparse_loss(case, index, query, key, per_head, scores, sums, backend):
    options = {"row_mask": case.mask, "backend": backend}
    lse = sparse_flash_attention(query, key, case.indices, 0.3, value_dim=9, backend="reference").lse
    # All ways to pass precomputed parts to the loss.
    given = [{}, {"topk_scores": scores}, {"attention_sum": sums}, {"lse": sliced(lse)}]
    return [indexer_kl_loss(*index, query, key, case.indices, 0.3, **some, **options) for some in given]


def score_gradient(case, index, query, key, per_head, scores, sums, backend):
    options = {"row_mask": case.mask, "backend": backend}
    loss, gradient = divergence_and_score_gradient(scores.detach(), sums, case.indices, **options)
    # The divergence has no gradient of its own.
    return [loss + 0 * scores.sum(), gradient]


def dense_loss(case, index, query, key, per_head, scores, sums, backend):
    options = {"row_mask": case.mask, "starts": case.starts, "ends": case.ends, "backend": backend}
    return [dense_indexer_kl_loss(*index, query, one, 0.3, **options) for one in (key, per_head)]


CALLS = [select, score, attend, sparse_loss, score_gradient, dense_loss]


def results(call, case, plain, backend):
    """Return the results of a call and the gradients of all its arguments."""
    leaves = [*case.index, case.query, case.key, case.per_head, case.scores, case.sums]
    if plain:
        leaves = [x.contiguous().clone() for x in leaves]
    leaves = [x.detach().requires_grad_() for x in leaves]
    returned = call(case, leaves[:3], *leaves[3:7], leaves[7].detach(), backend)
    differentiable = [x for x in returned if x.requires_grad]
    gradients = [case.gradient(x) for x in differentiable]
    if plain:
        gradients = [x.contiguous() for x in gradients]
    grads = torch.autograd.grad(differentiable, leaves[:7], gradients, allow_unused=True)
    return [*returned, *grads]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", ["cpu", "cpu, looped", "chunked"])
def test_layouts_change_nothing(call, backend, monkeypatch):
    name, _, products = backend.partition(", ")
    if products == "looped":
        # One oneDNN call per product, as for large products on processors that MKL does not know.
        monkeypatch.setattr(cpu_products, "_LOOP_MIN_FLOPS", 0)
        monkeypatch.setattr(cpu_products, "_MKL_IS_FAST", False)
    for seed in SEEDS:
        found = results(call, Case(seed), False, name)
        expected = results(call, Case(seed), True, "reference")
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None), seed
            if one is not None:
                assert one.dtype == other.dtype, seed
                error = (one - other).detach().abs().max()
                assert error <= 2e-5 * max(1, other.detach().abs().max()), seed


@pytest.mark.parametrize("width", [64, 65])
def test_wide_rows_of_int64_indices(width):
    # Only the first 64 or 65 of 100 entries are valid in every row, so operators work on a slice.
    query, key, weights = indexer_inputs(1, 5, 200)
    indices = torch.full((1, 5, 100), -1)
    indices[..., :width] = torch.arange(width)
    for variant in (indices, torch.cat([indices, indices], dim=-1)[..., :100]):
        found = selected_scores(query, key, weights, variant, backend="cpu")
        expected = selected_scores(query, key, weights, variant, backend="reference")
        assert torch.allclose(found, expected, atol=1e-5)
        out = sparse_flash_attention(query, key, variant, 0.3, value_dim=9, backend="cpu").out
        expected = sparse_flash_attention(query, key, variant, 0.3, value_dim=9, backend="reference").out
        assert torch.allclose(out, expected, atol=1e-5)
