"""The indexer loss with heads distributed over ranks equals the loss of one process with all heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.ops.indexer_kl_loss import (
    dense_indexer_kl_loss,
    divergence_and_score_gradient,
    indexer_kl_loss,
)
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.ops import oracle
from tests.ops.random_inputs import indexer_inputs

# -- functions that run in the pool's workers ------------------------------------------------------


SCALE = 0.3
TOPK = 9


def loss_and_gradients(
    form: str, index: list[Tensor], query: Tensor, key: Tensor, row_mask: Tensor, backend: str
) -> dict[str, Any]:
    """Return the loss, the gradients of the indexer's inputs, and the selection.

    Args:
        form: way to compute the loss: ``dense``, ``sparse`` (all in the loss), ``sum`` (from the attention's
            forward) or ``backward`` (in the attention's backward).
        index: query, key and weights of the indexer.
        query: ``[batch, rows, heads of all ranks, dim]``.
        key: ``[batch, rows, dim]``.
        row_mask: bool mask ``[batch, rows]``.
        backend: backend of all operators.
    """
    ranks = dist.get_world_size()
    query = query.chunk(ranks, dim=2)[dist.get_rank()].contiguous()
    leaves = [x.clone().requires_grad_() for x in index]
    tp: dict[str, Any] = {"tp_group": dist.group.WORLD if ranks > 1 else None}
    options: dict[str, Any] = {"row_mask": row_mask, "backend": backend, **tp}
    if form == "dense":
        loss = dense_indexer_kl_loss(*leaves, query, key, SCALE, **options)
        return _result(loss, torch.autograd.grad(loss, leaves), None)

    indices, scores = lightning_indexer(*leaves, TOPK, backend=backend)
    if form == "sparse":
        loss = indexer_kl_loss(*leaves, query, key, indices, SCALE, **options)
        return _result(loss, torch.autograd.grad(loss, leaves), indices)
    losses = []

    def hook(attention_sum: Tensor) -> Tensor:
        before = attention_sum.clone()
        loss, gradient = divergence_and_score_gradient(scores.detach(), attention_sum, indices, **options)
        assert torch.equal(attention_sum, before), "the sum of this rank was changed"
        losses.append(loss)
        return gradient

    hooked = {"topk_scores": scores, "score_gradient": hook} if form == "backward" else {}
    out, _, attention_sum = sparse_flash_attention(
        query, key, indices, SCALE, value_dim=12, return_attention_sum=True, backend=backend, **hooked
    )
    if form == "backward":
        gradients = torch.autograd.grad(out.sum(), leaves)
        return _result(losses[0], gradients, indices)
    assert attention_sum is not None
    before = attention_sum.clone()
    loss = indexer_kl_loss(
        *leaves, query, key, indices, SCALE, topk_scores=scores, attention_sum=attention_sum, **options
    )
    assert torch.equal(attention_sum, before), "the sum of this rank was changed"
    return _result(loss, torch.autograd.grad(loss, leaves), indices)


def _result(loss: Tensor, gradients: tuple[Tensor, ...], indices: Tensor | None) -> dict[str, Any]:
    return {"loss": loss.item(), "gradients": list(gradients), "indices": indices}


CASE = "tests.ops.test_tensor_parallel:loss_and_gradients"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.full), "cpu"])
def test_ranks_equal_one_process(pool, ranks, backend):
    generator = torch.Generator().manual_seed(6)
    # Heads of very different sharpness, so that a rank which normalises its own partial sum is far off.
    sharpness = torch.tensor([4.0, 0.1, 2.0, 0.3, 1.0, 0.2, 3.0, 0.5])[:, None]
    arguments = {
        "index": list(indexer_inputs(2, 33)),
        "query": torch.randn(2, 33, 8, 16, generator=generator) * sharpness,
        "key": torch.randn(2, 33, 16, generator=generator),
        "row_mask": torch.rand(2, 33, generator=generator) < 0.8,
        "backend": backend,
    }
    losses = {}
    for form in ("dense", "sparse", "sum", "backward"):
        (whole,) = pool.run(CASE, 1, form=form, **arguments)
        losses[form] = whole["loss"]
        for part in pool.run(CASE, ranks, form=form, **arguments):
            assert part["loss"] == pytest.approx(whole["loss"], rel=1e-5)
            for grad, expected in zip(part["gradients"], whole["gradients"], strict=True):
                assert oracle.relative_error(grad, expected) < 1e-5
            if form != "dense":
                assert torch.equal(part["indices"], whole["indices"])
    assert losses["sum"] == pytest.approx(losses["sparse"], rel=1e-5)
    assert losses["backward"] == pytest.approx(losses["sparse"], rel=1e-5)
    assert losses["dense"] != pytest.approx(losses["sparse"], rel=1e-2)
