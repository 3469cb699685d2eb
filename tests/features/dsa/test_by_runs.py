"""Attention and indexer loss computed run by run equal one call for all rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.context_parallel.layout import Zigzag
from mindspeed_dsa.context_parallel.packs import BalancedBlocks, Pack, PackRows
from mindspeed_dsa.features.dsa.operands import Operands
from mindspeed_dsa.features.dsa.problem import Groups, IndexInputs, LossOptions, Problem, Rows
from mindspeed_dsa.features.dsa.sparse_attention import attend_by_runs, sparse_attention

LENGTH, TOPK = 48, 6
HEADS, LATENT, ROPE, VALUE, INDEX_HEADS, INDEX = 2, 8, 4, 6, 8, 8
PACK = Pack.of_prefix_sums([0, 5, 22, 23, 41], None, LENGTH)  # the remaining rows are padding
LAYOUTS = {
    "one rank": (1, 2, Zigzag(1), None),
    "zigzag": (2, 2, Zigzag(2), None),
    "blocks": (2, 2, Zigzag(2, 4), None),
    "packs": (2, 1, BalancedBlocks(2, PACK, 4), PACK),
    "packs on one rank": (1, 1, None, PACK),
}
LOSSES = {"sparse": {"on_chosen_keys": True}, "dense": {"on_chosen_keys": False}}


def tensors(batch, rows):
    """Return fp64 operands of some rows and all keys, the indexer's inputs, and all leaves."""
    noise = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=noise, dtype=torch.float64)

    query, key = random(LENGTH, batch, HEADS, LATENT + ROPE)[rows], random(LENGTH, batch, 1, LATENT + ROPE)
    value, index_query = random(HEADS, VALUE, LATENT), random(batch, LENGTH, INDEX_HEADS, INDEX)[:, rows]
    index_key, weights = random(batch, LENGTH, INDEX), random(batch, LENGTH, INDEX_HEADS)[:, rows]
    leaves = [x.requires_grad_() for x in (query, key, value, index_query, index_key, weights)]
    return Operands(query, key, value, 0.3), IndexInputs(index_query, index_key, weights), leaves


def whole_and_runs(layout, rank, loss):
    """Return results and gradients of both ways, including losses computed in backward."""
    ranks, batch, dealt, pack = LAYOUTS[layout]
    # Only the size of the context parallel group is read if all rows count or their number is known.
    groups = Groups(context=SimpleNamespace(size=lambda: ranks) if ranks > 1 else None)
    positions = torch.arange(LENGTH) if dealt is None else dealt.rows_of_rank(rank, LENGTH)
    if pack is None:
        rows, all_rows = Rows(ends=(positions + 1).int()), LENGTH * batch
        breaks = ((positions.diff() != 1).nonzero().flatten() + 1).tolist()
        bounds = [0, *breaks, len(positions)]
        runs = [(a, b, 0, int(positions[b - 1]) + 1) for a, b in pairwise(bounds)]
    else:
        documents = PackRows(pack, dealt, rank)
        rows, all_rows = Rows.of_pack(documents, torch.device("cpu")), pack.tokens
        runs = documents.runs()
    # On the last zigzag rank both chunks are neighbours.
    assert len(runs) > 1 or layout in ("one rank", "zigzag")
    results = []
    for by_runs in (False, True):
        operands, index, leaves = tensors(batch, positions)
        shares = []

        def started(share, shares=shares):
            shares.append(share.detach())
            return torch.ones_like(share)

        wanted = replace(loss, in_backward=started) if loss.in_backward else loss
        layer = Problem(operands, TOPK, rows, groups, wanted, "reference")
        if by_runs:
            result = attend_by_runs(layer, index, runs, all_rows)
        else:
            result = sparse_attention(layer, index)
        total = (result.out * torch.arange(1.0, result.out.numel() + 1).view_as(result.out).sin()).sum()
        if result.loss is not None:
            total = total + result.loss
        total.backward()
        # Rows that see at most topk keys get their loss in forward, also with in_backward.
        value = sum(shares) + (0 if result.loss is None else result.loss.detach())
        results.append([result.out.detach(), value, *(leaf.grad for leaf in leaves)])
    return results


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize("kind", [*LOSSES, "sparse in backward"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_have_the_loss_and_the_gradients_of_all_rows(layout, kind, per_token):
    name, _, in_backward = kind.partition(" ")
    loss = LossOptions(
        0.7, per_token=per_token, in_backward=(lambda share: share) if in_backward else None, **LOSSES[name]
    )
    for rank in range(LAYOUTS[layout][0]):
        whole, runs = whole_and_runs(layout, rank, loss)
        assert float(whole[1]) > 0
        for expected, got in zip(whole, runs, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
