"""Operators compute products and sums in fp32 under torch.autocast too, with any number of threads."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.indexer_kl_loss import (
    dense_indexer_kl_loss,
    divergence_and_score_gradient,
    indexer_kl_loss,
)
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer, selected_scores
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.ops.random_inputs import BACKENDS, indexer_inputs, random_indices

ROWS = 40
INDICES = random_indices(2, ROWS, ROWS, 12)


def main_inputs():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, ROWS, *rest, 40, generator=generator).requires_grad_() for rest in ((6,), ())]


def select(index, main, backend):
    scores = lightning_indexer(*index, 12, backend=backend).topk_scores
    return scores[scores > -torch.inf]


def at(index, main, backend):
    return selected_scores(*index, INDICES, backend=backend)[INDICES >= 0]


def attend(index, main, backend):
    return sparse_flash_attention(*main, INDICES, 0.2, value_dim=32, backend=backend).out


def sparse(index, main, backend):
    return indexer_kl_loss(*index, *main, INDICES, 0.2, backend=backend)


def dense(index, main, backend):
    return dense_indexer_kl_loss(*index, *main, 0.2, backend=backend)


def score_gradient(index, main, backend):
    scores = selected_scores(*index, INDICES, backend=backend)

    def hook(attention_sum):
        return divergence_and_score_gradient(scores.detach(), attention_sum, INDICES, backend=backend)[1]

    return sparse_flash_attention(
        *main, INDICES, 0.2, value_dim=32, topk_scores=scores, score_gradient=hook, backend=backend
    ).out


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("call", [select, at, attend, sparse, dense, score_gradient])
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_nothing(call, backend, threads):
    results = []
    for enabled in (False, True):
        index = [x.requires_grad_() for x in indexer_inputs(2, ROWS)]
        leaves = [*index, *main_inputs()]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value = call(index, leaves[3:], backend).sin().sum()
            # Autograd differentiates the reference, and PyTorch wants backward outside of autocast.
            if backend != "reference":
                value.backward()
        if backend == "reference":
            value.backward()
        results.append([value.detach(), *(x.grad for x in leaves if x.grad is not None)])
    plain, under_autocast = results
    assert len(plain) >= 3
    for expected, result in zip(plain, under_autocast, strict=True):
        assert result.dtype == torch.float32
        assert torch.equal(result, expected)
