"""Rows of packs on context parallel ranks: any pack, the same number of rows, and equal work."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.context_parallel.layout import rows_of_all
from mindspeed_dsa.context_parallel.packs import BalancedBlocks, DocumentZigzag, Pack, layout_of
from mindspeed_dsa.features.attention.context_parallel import head_exchange


def pack_of(lengths, padding=0):
    sums = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return Pack.of_prefix_sums(sums, None, sums[-1] + padding)


def lognormal(mean, total, seed):
    generator, lengths = torch.Generator().manual_seed(seed), []
    while sum(lengths) < total:
        drawn = (torch.randn((), generator=generator) + torch.tensor(mean).log() - 0.5).exp()
        lengths.append(min(max(int(drawn), 1), total - sum(lengths)))
    return lengths


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_row_has_one_rank_and_every_rank_as_many_rows(ranks):
    pack = pack_of((5, 17, 0, 1, 40, 9), 72)
    rows = rows_of_all(BalancedBlocks(ranks, pack), pack.length)
    assert rows.shape == (ranks, pack.length // ranks)
    assert rows.flatten().sort().values.tolist() == list(range(pack.length))
    assert (rows.diff(dim=1) > 0).all()


@pytest.mark.parametrize("mean", [1024.0, 8192.0, 32768.0])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_equal_work(mean, ranks):
    """Compares the heaviest rank with the mean: pairs of the indexer, and of attention to 2048 keys."""
    for seed in range(3):
        pack = pack_of(lognormal(mean, 65536, seed))
        seen = (pack.ends - pack.starts)[rows_of_all(BalancedBlocks(ranks, pack), pack.length)].double()
        for pairs in (seen, seen.clamp_max(2048)):
            by_rank = pairs.sum(dim=1)
            assert by_rank.max() / by_rank.mean() <= 1.02


def test_documents_cut_by_transformer_engine():
    """Rank r has chunks ``r`` and ``2c - 1 - r`` of each document, as ``thd_get_partitioned_indices``."""
    params = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 8, 12]))
    layout = layout_of(params, pack_of((8, 4)), 2)
    assert [layout.rows_of_rank(rank, 12).tolist() for rank in (0, 1)] == [
        [0, 1, 6, 7, 8, 11],
        [2, 3, 4, 5, 9, 10],
    ]


@pytest.mark.parametrize(
    ("layout", "length", "message"),
    [
        (BalancedBlocks(3, pack_of((80,))), 80, "cannot be dealt evenly to 3"),
        (DocumentZigzag(2, ((0, 8), (8, 13))), 13, "a document that takes 5 rows of 13"),
        (DocumentZigzag(2, ((0, 8),)), 12, "documents take 8 of 12 rows"),
    ],
    ids=str,
)
def test_what_cannot_be_shared_is_refused(layout, length, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        layout.rows_of_rank(0, length)


def test_training_saves_the_order_that_an_evaluation_found():
    layout = BalancedBlocks(2, pack_of((3, 13)), 2)
    with torch.inference_mode():
        head_exchange._order_of_pack(layout, 16, 0, 2)
    rows = torch.randn(16, 2, requires_grad=True)
    head_exchange.in_order(rows, 2, head_exchange._order_of_pack(layout, 16, 0, 2)).sum().backward()
    assert torch.equal(rows.grad, torch.ones(16, 2))
